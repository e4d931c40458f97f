"""Real-time replay without ROS: a recording on its schedule through the real worker process, then
the statistics.

The parent only waits, shows progress from the shared counters and reads the records afterwards;
nothing of it runs in the worker. The lock-step mode is ``replay.lockstep``; the two are never
mixed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception_rt.capture.bag import Bag
from perception_rt.core.clock import NS_PER_S
from perception_rt.core.config import SourceConfig, WorkerConfig
from perception_rt.core.deadline import DeadlineSpec
from perception_rt.core.errors import UnavailableError
from perception_rt.core.frame import Outcome, Stage
from perception_rt.detector.model import load_model
from perception_rt.latency.recorder import Recorder
from perception_rt.latency.report import summarise
from perception_rt.replay.bag_frames import bag_frames
from perception_rt.runtime.shared_state import SharedState, SourceState
from perception_rt.runtime.worker_process import WorkerProcess

WORKER_MODULE = "perception_rt.runtime.worker"
READY_TIMEOUT_S = 180.0
POLL_S = 0.05
STOP_TIMEOUT_S = 10.0
HEARTBEAT_LOST_NS = 5 * NS_PER_S
MIN_RECORDS = 100_000
MAX_FRAME_RATE = 240
MAX_RECORDS = 2_000_000
"""Room for records: 27 MB at least, more for a long run, half a gigabyte at most."""

FACTOR_RUNS = 200
"""Warm-up runs of the first exit where its p99 is multiplied: of fewer, p99 is the maximum."""

Progress = Callable[[str, int, int], None]
"""Called now and then with what is going on, how far it is, and of how much (0: unknown)."""


@dataclass(frozen=True)
class ReplayOptions:
    """What a real-time replay is asked for.

    Attributes:
        config: of the worker; ``budget_ns`` is replaced by what ``deadline`` resolves to.
        deadline: as the user wrote it.
        loops: passes over the recording; 0: not limited by passes.
        seconds: ends after so long; 0: not limited by time.
    """

    config: WorkerConfig
    deadline: DeadlineSpec
    loops: int = 1
    seconds: float = 0.0


def count_frames(source: SourceConfig) -> int:
    """Frames that one pass of a recording promises; 0 for a video, where nobody knows.

    Raises:
        InputError: the bag cannot be used.
    """
    if source.kind != "bag":
        return 0
    bag = Bag(source.uri, source.topic)
    bag.open()
    return bag.promised


def replay(options: ReplayOptions, progress: Progress) -> dict[str, Any]:
    """Play a recording through a worker process and summarise what became of every frame.

    Returns:
        JSON-ready, see docs/json_commands.md; ``valid`` says whether it measured, ``reasons`` why
        not.

    Raises:
        PerceptionRtError: the worker's own words when it cannot start or ends early.
    """
    # The worker checks both again; here a bad one is refused at once and said once.
    frame_count = count_frames(options.config.source)
    load_model(options.config.model_dir)
    # A loop is seen to be over a moment after its end: one pass more than asked for.
    wanted = max(round(options.seconds * MAX_FRAME_RATE), frame_count * (options.loops + 1))
    recorder = Recorder.create(min(max(MIN_RECORDS, wanted), MAX_RECORDS))
    config = replace(
        options.config,
        record_fd=recorder.fd,
        first_exit_runs=FACTOR_RUNS if options.deadline.factor is not None else 0,
    )
    worker = WorkerProcess(config, module=WORKER_MODULE)
    try:
        worker.start()
        worker.wait_ready(READY_TIMEOUT_S, lambda done, total: progress("warm-up", done, total))
        budget_ns = options.deadline.resolve(worker.state.first_exit_p99_ns)
        worker.set_runtime(budget_ns=budget_ns)
        begin_ns = time.monotonic_ns()
        worker.activate()
        _play(worker, recorder, options, frame_count, progress)
        played_ns = time.monotonic_ns() - begin_ns
        worker.deactivate(STOP_TIMEOUT_S)
        state = _snapshot(worker.state)
        worker.stop(STOP_TIMEOUT_S)
        records = recorder.records()
        overflow = recorder.overflow
    finally:
        worker.close()
        recorder.close()
    summary = summarise(records, state["exit_count"])
    expected = 0 if config.source.loop else frame_count
    reasons, player = check(records, overflow, state["delivered"], expected)
    if len(records) and np.all(records["outcome"] == Outcome.FAILED):
        reasons.append(
            f"no usable frame: all {len(records)} FAILED, the first:"
            f" {_first_error(config.source) or 'in the network'}"
        )
    return {
        "command": "replay",
        "mode": "real_time",
        "source": config.source.uri,
        "model": config.model_dir,
        "budget_ns": budget_ns,
        "first_exit_p99_ns": state["first_exit_p99_ns"],
        "deadline_factor": options.deadline.factor,
        "rate": config.source.rate,
        "played_s": played_ns / NS_PER_S,
        "delivered": state["delivered"],
        "epochs": state["epoch"] + 1,
        "backend": state["backend"],
        "realtime": state["report"],
        "player": player,
        "valid": not reasons,
        "reasons": reasons,
        "summary": summary,
    }


def check(
    records: NDArray[Any], overflow: int, delivered: int, expected: int
) -> tuple[list[str], dict[str, int | None]]:
    """Whether a run measured anything that may be reported.

    Args:
        records: array of RECORD_DTYPE.
        overflow: records that found no room.
        delivered: frames that the source handed out.
        expected: frames that the recording holds; 0 where the run was not one whole pass, or
            nobody knows.

    Returns:
        Reasons why not (empty: valid), and the player's lateness: how long after its scheduled
        instant the capture of a frame began, ``lateness_p50_ns``, ``lateness_p99_ns``,
        ``lateness_max_ns``, ``bound_ns`` (None: no period is known, so nothing is checked).
    """
    reasons = []
    if overflow:
        reasons.append(f"recorder overflow: {overflow} records were lost, ask for a shorter run")
    if not len(records):
        return [*reasons, "no frame was recorded"], {}
    if expected and delivered != expected:
        reasons.append(
            f"missing frames: the recording holds {expected}, {delivered} were delivered"
        )
    if sorted(records["frame_id"].tolist()) != list(range(1, delivered + 1)):
        different = len(np.unique(records["frame_id"]))
        reasons.append(
            f"missing frames: {delivered} delivered,"
            f" {different} different frame ids in {len(records)} records"
        )
    start, end, left = records["start_ns"], records["end_ns"], records["left_ns"]
    negative = int(np.count_nonzero((left != 0) & (left < records["capture_stamp_ns"])))
    negative += int(np.count_nonzero((start != 0) & (end != 0) & (end < start)))
    if negative:
        reasons.append(f"negative latency: {negative} stages or frames ended before they began")
    lateness, bound_ns = _lateness(records)
    if bound_ns is not None and lateness["lateness_p99_ns"] > bound_ns:
        reasons.append(
            f"player late: p99 {lateness['lateness_p99_ns'] / 1e6:.1f} ms"
            f" after the scheduled instant, bound {bound_ns / 1e6:.1f} ms"
        )
    return reasons, {**lateness, "bound_ns": bound_ns}


def _first_error(source: SourceConfig) -> str:
    """Why the first frame that cannot be decoded cannot; records hold no words. Empty: unknown."""
    if source.kind != "bag":
        return ""
    return next((buffer.error for buffer in bag_frames(source) if buffer.error), "")


def _lateness(records: NDArray[Any]) -> tuple[dict[str, int], int | None]:
    lateness = np.sort(records["start_ns"][:, Stage.CAPTURE] - records["capture_stamp_ns"])
    periods = np.diff(np.sort(records["capture_stamp_ns"]))
    # Half a frame's period: beyond it the player itself decides which frames are replaced.
    period = int(np.median(periods)) if len(periods) else 0
    last = len(lateness) - 1
    measured = {
        "lateness_p50_ns": int(lateness[last // 2]),
        "lateness_p99_ns": int(lateness[-(-last * 99 // 100)]),
        "lateness_max_ns": int(lateness[last]),
    }
    return measured, period // 2 or None


def _play(
    worker: WorkerProcess,
    recorder: Recorder,
    options: ReplayOptions,
    frame_count: int,
    progress: Progress,
) -> None:
    state = worker.state
    total = frame_count * options.loops
    begin_ns = time.monotonic_ns()
    limit_ns = round(options.seconds * NS_PER_S)
    while state.source_state != SourceState.ENDED:
        _check_alive(worker)
        if recorder.overflow:
            return  # already INVALID: playing on cannot change that
        played_ns = time.monotonic_ns() - begin_ns
        if limit_ns:
            progress("replay", played_ns, limit_ns)
            if played_ns >= limit_ns:
                return
        else:
            progress("replay", state.delivered_frames, total)
            if options.config.source.loop and state.epoch >= options.loops:
                return
        time.sleep(POLL_S)


def _check_alive(worker: WorkerProcess) -> None:
    if worker.poll() is not None:
        worker.deactivate(0.0)  # raises what ended the worker, in its own words
    age_ns = time.monotonic_ns() - worker.state.heartbeat_ns
    if age_ns > HEARTBEAT_LOST_NS:
        raise UnavailableError(
            f"the worker gave no sign of life for {age_ns / NS_PER_S:.1f} s: see its output above"
        )


def _snapshot(state: SharedState) -> dict[str, Any]:
    return {
        "delivered": state.delivered_frames,
        "epoch": state.epoch,
        "exit_count": state.exit_count,
        "first_exit_p99_ns": state.first_exit_p99_ns,
        "report": json.loads(state.report or "{}"),
        "backend": {
            **json.loads(state.backend or "{}"),
            "degraded": bool(state.degraded),
            "switches": state.backend_switches,
            "fault": state.backend_fault,
        },
    }
