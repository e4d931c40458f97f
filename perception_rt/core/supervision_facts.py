"""What the supervision is fed with, its limits, and what it answers. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import NamedTuple

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.errors import UsageError
from perception_rt.core.frame import MAX_SEGMENTS, Outcome


class State(IntEnum):
    """What the supervisor thinks. Values are those of SupervisionStatus.msg."""

    DEACTIVATED = 0
    OK = 1
    FAILED = 2
    EXPIRED = 3
    SELF_LAG = 4


class Cause(IntFlag):
    """Why it thinks so. Values are those of SupervisionStatus.msg."""

    ALIVE = 1
    DEADLINE = 2
    LOGICAL = 4
    DATA = 8
    SELF_LAG = 16
    NOT_RECEIVED = 32
    DEGRADED = 64
    """The fallback backend runs: reported, changes neither state nor permit."""


class WorkerState(IntEnum):
    """``state`` of a heartbeat. Values are those of WorkerHeartbeat.msg."""

    STARTING = 0
    INACTIVE = 1
    ACTIVE = 2
    STOPPING = 3


class SourceState(IntEnum):
    """``source_state`` of a heartbeat. Values are those of WorkerHeartbeat.msg."""

    OK = 0
    LOST = 1
    ENDED = 2


_LEAST = {
    "cycle_ns": 1,
    "heartbeat_period_ns": 1,
    "lost_heartbeats": 2,
    "frozen_beats": 1,
    "tolerance": 0,
    "window_failed": 0,
    "consecutive_expired": 1,
    "grace_ns": 0,
    "frame_period_ns": 1,
    "frame_silence_floor_ns": 0,
    "report_patience_ns": 0,
    "min_exit_head": 0,
    "self_lag_cycles": 1,
}


@dataclass(frozen=True)
class SupervisionConfig:
    """Limits of the supervision; durations in nanoseconds.

    Attributes:
        cycle_ns: period of ``cycle``.
        heartbeat_period_ns: period of the worker's heartbeat; more than half of ``cycle_ns``.
        lost_heartbeats: periods without a heartbeat that lead straight to EXPIRED.
        frozen_beats: heartbeats over which a thread's counter may stand still.
        tolerance: error count that is still FAILED.
        window_length: frames of the (m,k)-firm window, at most 64.
        window_failed: FAILED above so many misses in the window.
        window_expired: EXPIRED above so many misses in the window.
        consecutive_expired: EXPIRED at so many misses in a row.
        grace_ns: from activation to the first frame.
        frame_period_ns: expected time between frames.
        frame_silence_floor_ns: shortest silence that counts, see ``frame_silence_ns``.
        report_patience_ns: after its deadline, until a frame's FrameTiming counts as lost or
            stale.
        min_exit_head: shallowest exit head that may be published.
        self_lag_cycles: own lateness, in cycles, above which the supervisor blames itself.

    Raises:
        UsageError: limits that cannot be met or contradict each other.
    """

    cycle_ns: int = 20 * NS_PER_MS
    heartbeat_period_ns: int = 20 * NS_PER_MS
    lost_heartbeats: int = 3
    frozen_beats: int = 5
    tolerance: int = 2
    window_length: int = 20
    window_failed: int = 2
    window_expired: int = 4
    consecutive_expired: int = 3
    grace_ns: int = 2000 * NS_PER_MS
    frame_period_ns: int = 33_333_333
    frame_silence_floor_ns: int = 250 * NS_PER_MS
    report_patience_ns: int = 60 * NS_PER_MS
    min_exit_head: int = 0
    self_lag_cycles: int = 2

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UsageError(
                    f"supervision: {name} must be at least {least}, got {getattr(self, name)}"
                )
        if 2 * self.heartbeat_period_ns <= self.cycle_ns:
            raise UsageError(
                f"supervision: twice the heartbeat period ({self.heartbeat_period_ns} ns) must be"
                f" more than the cycle ({self.cycle_ns} ns)"
            )
        if not self.window_failed <= self.window_expired < self.window_length <= 64:
            raise UsageError(
                "supervision: window_failed <= window_expired < window_length <= 64 must hold, got"
                f" {self.window_failed}, {self.window_expired}, {self.window_length}"
            )

    @property
    def frame_silence_ns(self) -> int:
        """Longest silence of FrameTiming: three periods, at least ``frame_silence_floor_ns``."""
        return max(3 * self.frame_period_ns, self.frame_silence_floor_ns)


class HeartbeatFacts(NamedTuple):
    """What the supervisor uses of a WorkerHeartbeat."""

    session_id: int
    node_session_id: int
    activation_count: int
    state: int
    sequence: int
    capture_count: int
    deadline_count: int
    inference_count: int
    source_state: int
    degraded: bool


class FrameFacts(NamedTuple):
    """What the supervisor uses of a FrameTiming; ``frame_skip``: replaced frames are no misses."""

    session_id: int
    frame_id: int
    epoch: int
    outcome: int
    exit_head: int
    deadline_ns: int
    left_ns: int
    capture_stamp_ns: int
    frame_skip: bool


class SupervisionResult(NamedTuple):
    """The judgement of one cycle; fields as in SupervisionStatus.msg.

    ``lost_frames``: frames of this session whose FrameTiming never came. ``epoch_changes``: jumps
    back of source time.
    """

    state: State
    causes: Cause
    permit: bool
    window_misses: int
    window_length: int
    consecutive_misses: int
    last_frame_id: int
    worker_session_id: int
    heartbeat_age_ns: int
    last_met_age_ns: int
    cycle_lateness_ns: int
    skipped_cycles: int
    lost_frames: int
    epoch_changes: int
    reason: str


_WORKER_STATES = frozenset(map(int, WorkerState))
_SOURCE_STATES = frozenset(map(int, SourceState))
_OUTCOMES = frozenset(map(int, Outcome))


def plausible_beat(beat: HeartbeatFacts) -> bool:
    """Whether every value of a heartbeat is one that can be."""
    return (
        beat.session_id > 0
        and beat.state in _WORKER_STATES
        and beat.source_state in _SOURCE_STATES
        and beat.sequence > 0
        and min(beat[:3]) >= 0
        and min(beat[5:8]) >= 0
        and beat.degraded in (False, True)
    )


def went_back(last: HeartbeatFacts, beat: HeartbeatFacts) -> bool:
    """A counter of one worker session that fell, or a worker that changed its parent."""
    return (
        beat.node_session_id != last.node_session_id
        or beat.activation_count < last.activation_count
        or beat.capture_count < last.capture_count
        or beat.deadline_count < last.deadline_count
        or beat.inference_count < last.inference_count
    )


def plausible_frame(frame: FrameFacts) -> bool:
    """Whether every value of a FrameTiming is one that can be."""
    return (
        frame.session_id > 0
        and frame.frame_id > 0
        and frame.epoch >= 0
        and frame.outcome in _OUTCOMES
        and -1 <= frame.exit_head < MAX_SEGMENTS
        and frame.deadline_ns > frame.capture_stamp_ns
        and frame.left_ns >= 0
    )
