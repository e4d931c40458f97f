"""What the detector says on /diagnostics, by the conventions of diagnostic_updater (which has no
wheel).

One DiagnosticStatus per aspect, named ``NODE: ASPECT``; values are text. Rates and misses are
those since the report before, so that a fault that is over does not colour the present.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from diagnostic_msgs.msg import DiagnosticStatus, KeyValue

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.frame import Outcome
from perception_rt.ros.worker_keeper import Phase, WorkerKeeper
from perception_rt.runtime.shared_state import SharedState, SourceState, WorkerState

OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR


class _Counts(NamedTuple):
    at_ns: int
    session_id: int
    delivered: int
    totals: list[int]


class Diagnostics:
    """Builds the statuses of one detector.

    Args:
        node_name: fully qualified name of the node.
    """

    def __init__(self, node_name: str) -> None:
        self._prefix = node_name.lstrip("/")
        self._before: _Counts | None = None

    def statuses(
        self,
        now_ns: int,
        lifecycle: str,
        keeper: WorkerKeeper | None,
        hardware_id: str,
        incompatible: Sequence[str],
        given_up: str,
    ) -> list[DiagnosticStatus]:
        """The present statuses.

        Args:
            now_ns: CLOCK_MONOTONIC.
            lifecycle: label of the node's state.
            keeper: of the worker; None while unconfigured.
            hardware_id: what frames come from.
            incompatible: subscribers that cannot be served because of their QoS.
            given_up: why the node stopped trying to keep a worker; empty when it did not.
        """
        state = keeper.process.state if keeper is not None and keeper.process is not None else None
        statuses = [self._worker(now_ns, lifecycle, keeper, state, given_up)]
        if state is not None:
            frame_skip = bool(state.frame_skip)
            active = state.worker_state == WorkerState.ACTIVE
            now = _Counts(now_ns, state.session_id, state.delivered_frames, state.outcome_totals)
            before = self._before
            if before is None or before.session_id != now.session_id or not active:
                before = now
            self._before = now if active else None
            statuses += [
                self._deadline(before, now, state, frame_skip),
                self._source(before, now, state),
                self._backend(state),
                self._realtime(state),
            ]
        level = WARN if incompatible else OK
        text = (
            f"{len(incompatible)} subscribers with incompatible QoS"
            if incompatible
            else "all compatible"
        )
        values = {f"subscriber {i}": reason for i, reason in enumerate(incompatible)}
        statuses.append(self._status("qos", level, text, values))
        for status in statuses:
            status.hardware_id = hardware_id
        return statuses

    def _worker(
        self,
        now_ns: int,
        lifecycle: str,
        keeper: WorkerKeeper | None,
        state: SharedState | None,
        given_up: str,
    ) -> DiagnosticStatus:
        values: dict[str, object] = {"lifecycle": lifecycle}
        if given_up:
            return self._status("worker", ERROR, f"given up: {given_up}", values)
        if keeper is None:
            return self._status("worker", OK, f"no worker while {lifecycle}", values)
        values.update(phase=keeper.phase.value, restarts=keeper.restarts, last_end=keeper.last_end)
        if keeper.process is not None and state is not None:
            values.update(
                pid=keeper.process.pid,
                session_id=state.session_id,
                heartbeat_age_ms=_ms(now_ns - state.heartbeat_ns),
                heartbeat_gap_max_ms=_ms(state.heartbeat_gap_max_ns),
                capture_count=state.capture_count,
                deadline_count=state.deadline_count,
                inference_count=state.inference_count,
            )
        if keeper.phase is not Phase.RUNNING:
            return self._status(
                "worker", ERROR, f"{keeper.phase.value}: {keeper.last_end}", values
            )
        if keeper.restarts:
            text = f"restarted {keeper.restarts} times, last: {keeper.last_end}"
            return self._status("worker", WARN, text, values)
        return self._status("worker", OK, "running", values)

    def _deadline(
        self, before: _Counts, now: _Counts, state: SharedState, frame_skip: bool
    ) -> DiagnosticStatus:
        fresh = [new - old for new, old in zip(now.totals, before.totals)]
        misses = sum(
            count
            for outcome, count in zip(Outcome, fresh)
            if not outcome.met and not (frame_skip and outcome is Outcome.REPLACED)
        )
        values: dict[str, object] = {
            outcome.name: count for outcome, count in zip(Outcome, now.totals)
        }
        values["deadline_ms"] = _ms(state.budget_ns)
        values["misses_since_last_report"] = misses
        values["frames_since_last_report"] = sum(fresh)
        text = f"{misses} misses in the last {sum(fresh)} frames"
        level = OK if not misses else (ERROR if misses == sum(fresh) else WARN)
        return self._status("deadline", level, text, values)

    def _source(self, before: _Counts, now: _Counts, state: SharedState) -> DiagnosticStatus:
        seconds = (now.at_ns - before.at_ns) / NS_PER_S
        rate = (now.delivered - before.delivered) / seconds if seconds > 0 else 0.0
        source = SourceState(state.source_state)
        values: dict[str, object] = {
            "state": source.name,
            "delivered_frames": now.delivered,
            "epoch": state.epoch,
            "stamp_source": state.stamp_source,
            "rate_hz": f"{rate:.2f}",
        }
        level = {SourceState.OK: OK, SourceState.LOST: ERROR, SourceState.ENDED: WARN}[source]
        return self._status(
            "source", level, f"{source.name}, {rate:.2f} frames per second", values
        )

    def _backend(self, state: SharedState) -> DiagnosticStatus:
        chosen = json.loads(state.backend or "{}")
        primary, fallback = chosen.get("primary", ""), chosen.get("fallback", "")
        running = fallback if state.backend_role else primary
        fault = state.backend_fault
        values: dict[str, object] = {
            "primary": primary,
            "fallback": fallback or "none",
            "running": running,
            "switches": state.backend_switches,
            "reason": chosen.get("reason", ""),
            "detail": chosen.get("detail", ""),
        }
        if state.degraded:
            return self._status("backend", WARN, f"DEGRADED, {running} runs: {fault}", values)
        if fault:
            return self._status("backend", WARN, fault, values)
        return self._status("backend", OK, f"{running} runs", values)

    def _realtime(self, state: SharedState) -> DiagnosticStatus:
        report = json.loads(state.report or "{}")
        values: dict[str, object] = {
            f"thread {t['name']}": f"{t['policy']} {t['priority']} on {t['cores']}"
            for t in report.get("threads", [])
        }
        values.update({key: report[key] for key in ("locked_kib", "gc_frozen") if key in report})
        missing = report.get("missing", [])
        values.update({f"missing {i}": line for i, line in enumerate(missing)})
        text = f"{len(missing)} rights missing" if missing else "as asked for"
        return self._status("realtime", WARN if missing else OK, text, values)

    def _status(
        self, aspect: str, level: bytes, message: str, values: Mapping[str, object]
    ) -> DiagnosticStatus:
        return DiagnosticStatus(
            level=level,
            name=f"{self._prefix}: {aspect}",
            message=message,
            values=[KeyValue(key=key, value=str(value)) for key, value in values.items()],
        )


def _ms(ns: int) -> str:
    return f"{ns / NS_PER_MS:.3f}"
