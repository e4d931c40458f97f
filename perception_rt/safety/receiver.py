"""The process ``safety_receiver``: stands for the safety controller in tests and demos. No ROS.

``main`` feeds ``judge.Receiver`` from a UDP socket, on an absolute 5 ms schedule; one turn of the
loop is budgeted at 1 ms.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.errors import (
    PerceptionRtError,
    UnavailableError,
    UsageError,
)
from perception_rt.safety.e2e import DEFAULT_DATA_ID, check_data_id
from perception_rt.safety.judge import CYCLE_NS, TIMEOUT_NS, Receiver, Transition
from perception_rt.safety.transports import DEFAULT_HOST, DEFAULT_PORT, UdpReceiver, can_write

DEFAULT_PRIORITY = 84
"""Below the watchdog, above the worker's threads: on one machine they would hold its cycles up."""

_MOST_DISCARDED = 4096
"""Bound on clearing the socket, whatever arrives; a default buffer holds fewer PDUs."""
_KEPT_TRANSITIONS = 1000


class Journal:
    """Says each transition and keeps the newest; with a file, writes each as a JSON line, flushed
    at once.

    Args:
        log: open text file; None: memory only.
    """

    def __init__(self, log: IO[str] | None) -> None:
        self._log = log
        self._transitions: deque[Transition] = deque(maxlen=_KEPT_TRANSITIONS)
        self.count = 0
        self.log_errors = 0

    def transition(self, transition: Transition) -> None:
        """Take one transition."""
        self.count += 1
        self._transitions.append(transition)
        self._say(transition)
        self.write({"event": "transition", **transition._asdict()})

    def _say(self, transition: Transition) -> None:
        """Say it on standard output, unless nobody takes the line: then the cycle goes first."""
        if not can_write(sys.stdout.fileno()):
            self.log_errors += 1
            return
        since_ms = transition.since_accepted_ns / NS_PER_MS
        after = f", {since_ms:.1f} ms after the last accepted PDU" if since_ms >= 0 else ""
        print(
            f"safety_receiver: {transition.kind} {transition.before} -> {transition.after} "
            f"at {transition.monotonic_ns} ns{after}: {transition.reason}",
            flush=True,
        )

    def write(self, entry: dict[str, Any]) -> None:
        """Write one line, with the wall time added; a failing disk is counted, no more."""
        if self._log is None:
            return
        try:
            self._log.write(json.dumps({**entry, "wall_ns": time.time_ns()}) + "\n")
            self._log.flush()
        except OSError:
            self.log_errors += 1

    def summary(self) -> dict[str, Any]:
        """Number of transitions, and the newest ``_KEPT_TRANSITIONS`` of them."""
        return {
            "log_errors": self.log_errors,
            "transition_count": self.count,
            "transitions": [transition._asdict() for transition in self._transitions],
        }


@dataclass
class LoopCounts:
    """What the loop itself did.

    Attributes:
        skipped_cycles: were due and never ran.
        max_lateness_ns: of a cycle, ns.
        discarded: datagrams thrown away as stale.
    """

    skipped_cycles: int = 0
    max_lateness_ns: int = 0
    discarded: int = 0


def run_loop(
    receiver: Receiver, link: UdpReceiver, stop: Callable[[], bool], end_ns: int | None
) -> LoopCounts:
    """Evaluate every 5 ms and take datagrams as they arrive, until told to stop.

    After a stall of ``TIMEOUT_NS`` or more, what waits in the socket is thrown away: it would be
    read in sequence, as if it were fresh.

    Args:
        receiver: the judge.
        link: where datagrams come from.
        stop: asked once each turn.
        end_ns: last instant, CLOCK_MONOTONIC; None: none.
    """
    counts = LoopCounts()
    next_ns = time.monotonic_ns() + CYCLE_NS
    while not stop():
        now_ns = time.monotonic_ns()
        if end_ns is not None and now_ns >= end_ns:
            break
        late_ns = now_ns - next_ns
        if late_ns < 0:
            if link.wait(-late_ns):
                # One each turn: a due cycle is never kept waiting, and knows of a stall first.
                datagram = link.receive()
                if datagram is not None:
                    receiver.on_datagram(time.monotonic_ns(), datagram)
            continue
        receiver.evaluate(now_ns)
        skipped = late_ns // CYCLE_NS
        next_ns += (skipped + 1) * CYCLE_NS
        counts.skipped_cycles += skipped
        counts.max_lateness_ns = max(counts.max_lateness_ns, late_ns)
        if late_ns >= TIMEOUT_NS:
            for _ in range(_MOST_DISCARDED):
                if link.receive() is None:
                    break
                counts.discarded += 1
    return counts


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"safety_receiver: {message}; see --help")


def without_ros_arguments(arguments: Sequence[str]) -> list[str]:
    """Cut what ros2 launch appends: each stretch from ``--ros-args`` to ``--`` or the end."""
    kept: list[str] = []
    inside = False
    for argument in arguments:
        if argument == "--ros-args":
            inside = True
        elif not inside:
            kept.append(argument)
        elif argument == "--":
            inside = False
    return kept


def _data_id(text: str) -> int:
    try:
        return check_data_id(int(text, 0))
    except ValueError:
        raise UsageError(f"--data-id '{text}' is not a number: give decimal or 0x...") from None


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="safety_receiver", description="Reference receiver of the perception_rt safety PDU."
    )
    parser.add_argument(
        "--host", default=DEFAULT_HOST, help="address to listen on (default %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="UDP port, 0: any free (default %(default)s)",
    )
    parser.add_argument(
        "--data-id",
        type=_data_id,
        default=DEFAULT_DATA_ID,
        help=f"E2E data id, decimal or 0x... (default {DEFAULT_DATA_ID:#x})",
    )
    parser.add_argument(
        "--accept-simulated",
        action="store_true",
        help="grant for bags, videos, simulated time too",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the summary there at exit"
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="append each transition as a JSON line"
    )
    parser.add_argument(
        "--for", dest="seconds", type=float, metavar="SECONDS", help="stop after that long"
    )
    parser.add_argument(
        "--priority",
        type=int,
        default=DEFAULT_PRIORITY,
        help="SCHED_FIFO priority 1 to 98, 0: none (default %(default)s; refused: warns, runs on)",
    )
    options = parser.parse_args(without_ros_arguments(arguments))
    if options.seconds is not None and not 0 < options.seconds < 1e9:
        raise UsageError(f"--for must be above 0 s and below 1e9 s, got {options.seconds:g}")
    if not 0 <= options.priority <= 98:
        raise UsageError(f"--priority must be from 0 to 98, got {options.priority}")
    return options


def _open(path: Path | None, mode: str) -> IO[str] | None:
    if path is None:
        return None
    try:
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}): choose another file") from None


def take_priority(priority: int) -> int:
    """Ask for SCHED_FIFO; returns the priority in force: 0 when refused, which is warned of."""
    if priority:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
        except OSError as error:
            print(
                f"safety_receiver: warning: SCHED_FIFO {priority} refused ({error.strerror}), "
                "cycles will be late under load: raise the rtprio limit",
                file=sys.stderr,
            )
            return 0
    return priority


def _run(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    stopping = False

    def on_signal(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    journal = Journal(_open(options.log, "a"))
    # Opened before the run: a path that cannot be written is known at once, not after the run.
    output = _open(options.json, "w")
    link = UdpReceiver(options.host, options.port)
    receiver = Receiver(
        options.data_id,
        accept_simulated=options.accept_simulated,
        on_transition=journal.transition,
    )
    priority = take_priority(options.priority)
    gc.collect()
    gc.freeze()
    gc.disable()
    started_ns = time.monotonic_ns()
    print(
        f"safety_receiver: listening on {options.host}:{link.port}, "
        f"data id {options.data_id:#010x}",
        flush=True,
    )
    journal.write(
        {
            "event": "start",
            "monotonic_ns": started_ns,
            "port": link.port,
            "data_id": options.data_id,
        }
    )
    end_ns = None if options.seconds is None else started_ns + int(options.seconds * NS_PER_S)
    counts = run_loop(receiver, link, lambda: stopping, end_ns)
    stopped_ns = time.monotonic_ns()
    link.close()
    journal.write({"event": "stop", "monotonic_ns": stopped_ns})
    if output is not None:
        summary = {
            **receiver.summary(),
            "data_id": options.data_id,
            "priority": priority,
            "accept_simulated": options.accept_simulated,
            "started_ns": started_ns,
            "stopped_ns": stopped_ns,
            "skipped_cycles": counts.skipped_cycles,
            "max_lateness_ns": counts.max_lateness_ns,
            "discarded": counts.discarded,
            "receive_errors": link.errors,
            **journal.summary(),
        }
        try:
            with output:
                json.dump(summary, output, indent=2)
                output.write("\n")
        except OSError as error:
            raise UnavailableError(
                f"cannot write {options.json} ({error.strerror}): free some space"
            ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Console script ``safety_receiver``; returns 0, or the exit code of the error it printed."""
    try:
        _run(sys.argv[1:] if arguments is None else arguments)
    except PerceptionRtError as error:
        print(f"safety_receiver: {str(error).removeprefix('safety_receiver: ')}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
