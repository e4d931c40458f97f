"""Which segment to launch, what to publish, and when to give up. Pure: every instant is handed in.

The rule for every launch is ``start_k + Q_k + M <= deadline``: start_k is now plus what is still
in flight, Q_k the high quantile of segment k's recent durations (``latency_model``), and M =
postprocess + publish + wake margin.

The caller asks ``decide`` again after every launch, every finished segment and every wake-up.
PUBLISH and MISS end the frame: nothing of it is launched or published after them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.errors import UsageError
from perception_rt.core.frame import Outcome, Stage
from perception_rt.core.latency_model import LatencyModel

DEFAULT_WAKE_MARGIN_NS = NS_PER_MS
"""Allowed lateness of the deadline thread's wake-up; its measured p99 is 0.35 ms (FIFO)."""


class Action(IntEnum):
    """What to do next with a frame."""

    LAUNCH = 0
    WAIT = 1
    PUBLISH = 2
    MISS = 3


class Decision(NamedTuple):
    """What to do next with a frame.

    Attributes:
        action: LAUNCH, WAIT, PUBLISH or MISS.
        segment: LAUNCH: segment to launch; PUBLISH: exit head to publish; else -1.
        until_ns: WAIT: CLOCK_MONOTONIC instant to ask again at, unless something finishes before;
            else 0.
        outcome: PUBLISH: OK, EARLY or OVERRUN; MISS: LATE or EXPIRED; else None.
    """

    action: Action
    segment: int = -1
    until_ns: int = 0
    outcome: Outcome | None = None


_MISS_EXPIRED = Decision(Action.MISS, outcome=Outcome.EXPIRED)
_MISS_LATE = Decision(Action.MISS, outcome=Outcome.LATE)


class ExitPolicy:
    """Decides the fate of one frame at a time; keeps no state of its own between calls.

    A call costs a few additions and one small tuple: 2 to 3 us on a 2-core VM.

    Args:
        exit_count: segments of the model, each with an exit head behind it.
        model: durations of every stage; preprocess, all segments, postprocess and publish need a
            prior.
        wake_margin_ns: allowed lateness of the caller's wake-up at ``deadline - M``.
        look_ahead: segments that may be launched behind the one in flight, 0 or 1.

    Raises:
        UsageError: a value out of range.
    """

    def __init__(
        self,
        exit_count: int,
        model: LatencyModel,
        wake_margin_ns: int = DEFAULT_WAKE_MARGIN_NS,
        look_ahead: int = 0,
    ) -> None:
        if exit_count != model.segments:
            raise UsageError(
                f"{exit_count} exit heads do not fit a latency model of {model.segments} segments"
            )
        if wake_margin_ns < 0:
            raise UsageError(f"the wake margin cannot be negative, got {wake_margin_ns} ns")
        if look_ahead not in (0, 1):
            raise UsageError(f"look-ahead must be 0 or 1 segments, got {look_ahead}")
        self._deepest = exit_count - 1
        self._model = model
        self._wake_margin_ns = wake_margin_ns
        self._look_ahead = look_ahead

    def _tail_ns(self) -> int:
        return self._model.quantile_ns(Stage.POSTPROCESS) + self._model.quantile_ns(Stage.PUBLISH)

    def _segment_ns(self, k: int) -> int:
        """Quantile of segment ``k``; preprocess is part of launching segment 0."""
        ns = self._model.quantile_ns(Stage.SEGMENT_0 + k)
        return ns + self._model.quantile_ns(Stage.PREPROCESS) if k == 0 else ns

    def margin_ns(self) -> int:
        """M: postprocess and publish quantiles plus the wake margin, nanoseconds."""
        return self._tail_ns() + self._wake_margin_ns

    def latest_start_ns(self, deadline_ns: int) -> int:
        """The last instant at which preprocess and segment 0 still fit before ``deadline_ns``."""
        return deadline_ns - self.margin_ns() - self._segment_ns(0)

    def decide(
        self,
        now_ns: int,
        deadline_ns: int,
        launched: int,
        finished: int,
        busy: bool,
        launched_at_ns: int,
        release_by_ns: int | None = None,
        backlog_ns: int = 0,
    ) -> Decision:
        """What to do next with the present frame. All instants are CLOCK_MONOTONIC nanoseconds.

        Args:
            now_ns: the present instant.
            deadline_ns: of this frame.
            launched: deepest segment launched for this frame, -1 for none.
            finished: deepest segment of this frame that has finished, -1 for none.
            busy: a segment of an older frame still drains, and nothing can be queued behind it.
            launched_at_ns: when segment ``launched`` could begin: its launch, or the end of the
                one before it where that came later. Used with look-ahead only.
            release_by_ns: a segment behind the first must end by then for the sake of other
                frames (``occupancy``); None: no such bound.
            backlog_ns: how long older work is still expected to take, when this frame's first
                segment can be queued behind it.
        """
        if launched < 0:
            latest_ns = self.latest_start_ns(deadline_ns) - backlog_ns
            if now_ns <= latest_ns and not busy:
                return Decision(Action.LAUNCH, 0)
            if now_ns < latest_ns:
                return Decision(Action.WAIT, until_ns=latest_ns)
            return _MISS_EXPIRED
        publish_by_ns = deadline_ns - self.margin_ns()
        if launched < self._deepest and launched - finished <= self._look_ahead:
            start_ns = now_ns
            if launched > finished:
                start_ns = max(now_ns, launched_at_ns + self._segment_ns(launched))
            end_ns = start_ns + self._segment_ns(launched + 1)
            if end_ns <= publish_by_ns and (release_by_ns is None or end_ns <= release_by_ns):
                return Decision(Action.LAUNCH, launched + 1)
        if finished == launched:
            return self._release(
                now_ns,
                deadline_ns,
                finished,
                Outcome.OK if finished == self._deepest else Outcome.EARLY,
            )
        if finished >= 0:
            if now_ns < publish_by_ns:
                return Decision(Action.WAIT, until_ns=publish_by_ns)
            return self._release(now_ns, deadline_ns, finished, Outcome.OVERRUN)
        if now_ns < deadline_ns:
            return Decision(Action.WAIT, until_ns=deadline_ns)
        return _MISS_LATE

    def _release(
        self, now_ns: int, deadline_ns: int, exit_head: int, outcome: Outcome
    ) -> Decision:
        """Publish while that still fits (the wake margin is spent by now), else miss in time."""
        if now_ns + self._tail_ns() <= deadline_ns:
            return Decision(Action.PUBLISH, exit_head, outcome=outcome)
        if now_ns < deadline_ns:
            return Decision(Action.WAIT, until_ns=deadline_ns)
        return _MISS_LATE
