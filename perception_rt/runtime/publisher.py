"""Where the deadline thread's answers, records and heartbeats go."""

from __future__ import annotations

from typing import Protocol

from perception_rt.core.frame import FrameRecord, Outcome
from perception_rt.detector.postprocess import Detections
from perception_rt.runtime.shared_state import WorkerState


class Heartbeat:
    """What a WorkerHeartbeat message carries; one object, reused. Fields as in
    WorkerHeartbeat.msg.
    """

    __slots__ = (
        "activation_count",
        "capture_count",
        "deadline_count",
        "degraded",
        "delivered_frames",
        "inference_count",
        "node_session_id",
        "outcome_totals",
        "sequence",
        "session_id",
        "source_state",
        "stamp_ns",
        "stamp_source",
        "state",
    )

    def __init__(self, session_id: int, node_session_id: int) -> None:
        self.session_id = session_id
        self.node_session_id = node_session_id
        self.stamp_ns = 0
        self.activation_count = 0
        self.state = int(WorkerState.STARTING)
        self.sequence = 0
        self.capture_count = 0
        self.deadline_count = 0
        self.inference_count = 0
        self.delivered_frames = 0
        self.outcome_totals: list[int] = [0] * len(Outcome)
        self.source_state = 0
        self.stamp_source = 0
        self.degraded = False


class Publisher(Protocol):
    """Where answers, records and heartbeats go. Called from the deadline thread only; must not
    block.
    """

    def warm_up(self, detections: Detections, runs: int) -> list[int]:
        """Rehearse publishing ``runs`` times without being heard; the nanoseconds each took."""

    def detections(self, record: FrameRecord, detections: Detections) -> None:
        """Send the answer of the frame in ``record``; it has left when this returns."""

    def timing(self, record: FrameRecord, totals: list[int]) -> None:
        """Send a finished record with the session's outcome totals (index: Outcome)."""

    def heartbeat(self, beat: Heartbeat) -> None:
        """Send a heartbeat."""


class NullPublisher:
    """Publishes nothing: for replay, where the record ring is the output."""

    def warm_up(self, _detections: Detections, runs: int) -> list[int]:
        """Publishing to nobody takes nothing."""
        return [0] * runs

    def detections(self, record: FrameRecord, detections: Detections) -> None:
        """Send nothing."""

    def timing(self, record: FrameRecord, totals: list[int]) -> None:
        """Send nothing."""

    def heartbeat(self, beat: Heartbeat) -> None:
        """Send nothing."""
