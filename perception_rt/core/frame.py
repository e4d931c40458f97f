"""One frame's vocabulary: outcome, stages, stamps, and the record that is kept of it.

All instants are CLOCK_MONOTONIC nanoseconds unless a name says ``header`` (the image's own stamp,
ROS time).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SEGMENTS = 8
"""Segments a model may have: fixed, so that a record has a fixed size."""


class Outcome(IntEnum):
    """What became of a frame: exactly one each. Values are those of FrameTiming.msg."""

    OK = 0
    """The deepest exit left in time."""
    EARLY = 1
    """A shallower exit, by plan, left in time."""
    OVERRUN = 2
    """A launched segment was not ready; the exit before it left in time."""
    LATE = 3
    """Launched, but no answer left by the deadline."""
    EXPIRED = 4
    """No exit could make it: not computed."""
    REPLACED = 5
    """A newer frame took its place before any segment was launched."""
    FAILED = 6
    """An error: bad image, NaN, backend fault."""

    @property
    def met(self) -> bool:
        """True when a detections message left by the deadline."""
        return self <= Outcome.OVERRUN


class StampSource(IntEnum):
    """Where the capture stamp comes from. Values are those of FrameTiming.msg."""

    SENSOR = 0
    DRIVER = 1
    HEADER_SAME_HOST = 2
    RECEIPT = 3
    SIMULATED = 4


class Stage(IntEnum):
    """Index of a stage in a record's ``start_ns`` and ``end_ns``; segment k is ``SEGMENT_0 +
    k``.
    """

    CAPTURE = 0
    QUEUE = 1
    PREPROCESS = 2
    POSTPROCESS = 3
    PUBLISH = 4
    SEGMENT_0 = 5


STAGE_COUNT = Stage.SEGMENT_0 + MAX_SEGMENTS


def stage_name(index: int) -> str:
    """The term used everywhere for stage ``index``: ``capture`` ... ``publish``, ``segment 0``
    ...
    """
    if index >= Stage.SEGMENT_0:
        return f"segment {index - Stage.SEGMENT_0}"
    return Stage(index).name.lower()


class FrameBuffer:
    """Pixels of one frame with its stamps; preallocated, filled by a source, owned by one thread
    at a time.

    Attributes:
        image: uint8 [height, width, 3], BGR; a view of ``storage`` or of the decoder's reused
            output.
        frame_id: from 1 in a session, in order of delivery by the source.
        epoch: jumps back of source time in this session.
        capture_stamp_ns: the instant budgets count from.
        header_stamp_ns: the image's own stamp (ROS time), passed on unchanged.
        header_frame_id: the image's own frame_id, passed on unchanged.
        capture_start_ns, capture_end_ns: when the source began to take the frame, and had it
            decoded.
        clock_offset_ns, clock_offset_error_ns: CLOCK_REALTIME - CLOCK_MONOTONIC at capture, and
            its bound.
        error: why the frame cannot be used; empty when it can.
    """

    __slots__ = (
        "capture_end_ns",
        "capture_stamp_ns",
        "capture_start_ns",
        "clock_offset_error_ns",
        "clock_offset_ns",
        "epoch",
        "error",
        "frame_id",
        "header_frame_id",
        "header_stamp_ns",
        "image",
        "stamp_source",
        "storage",
    )

    def __init__(self) -> None:
        self.storage: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.image: NDArray[np.uint8] = self.storage.reshape(0, 0, 3)
        self.frame_id = 0
        self.epoch = 0
        self.stamp_source = StampSource.RECEIPT
        self.capture_stamp_ns = 0
        self.header_stamp_ns = 0
        self.header_frame_id = ""
        self.capture_start_ns = 0
        self.capture_end_ns = 0
        self.clock_offset_ns = 0
        self.clock_offset_error_ns = 0
        self.error = ""

    def reserve(self, height: int, width: int) -> NDArray[np.uint8]:
        """Make ``image`` a [height, width, 3] view; allocates only when the frame size grows."""
        size = height * width * 3
        if self.storage.size < size:
            self.storage = np.zeros(size, np.uint8)
        if self.image.shape != (height, width, 3) or self.image.base is not self.storage:
            self.image = self.storage[:size].reshape(height, width, 3)
        return self.image


RECORD_DTYPE = np.dtype(
    [
        ("frame_id", "<u8"),
        ("epoch", "<u4"),
        ("detection_count", "<u4"),
        ("outcome", "u1"),
        ("stamp_source", "u1"),
        ("exit_head", "i1"),
        ("exit_count", "u1"),
        ("reserved", "<u4"),
        ("header_stamp_ns", "<i8"),
        ("capture_stamp_ns", "<i8"),
        ("budget_ns", "<i8"),
        ("deadline_ns", "<i8"),
        ("left_ns", "<i8"),
        ("start_ns", "<i8", (STAGE_COUNT,)),
        ("end_ns", "<i8", (STAGE_COUNT,)),
    ]
)
"""A record as it is stored: fixed size, so that a ring of them can lie in shared memory."""


class FrameRecord:
    """What is known of one frame when its outcome is decided; the source of FrameTiming and of
    every statistic.

    ``start_ns`` and ``end_ns`` are lists of ``STAGE_COUNT`` instants (index: ``Stage``), 0 where
    a stage did not happen. ``left_ns`` is the instant at which publish() returned, 0 when nothing
    was published. ``exit_head`` is -1 when no exit answered.
    """

    __slots__ = (
        "budget_ns",
        "capture_stamp_ns",
        "clock_offset_error_ns",
        "clock_offset_ns",
        "deadline_ns",
        "detection_count",
        "end_ns",
        "epoch",
        "exit_count",
        "exit_head",
        "frame_id",
        "header_frame_id",
        "header_stamp_ns",
        "left_ns",
        "outcome",
        "reason",
        "stamp_source",
        "start_ns",
    )

    def __init__(self, exit_count: int = 0) -> None:
        self.exit_count = exit_count
        self.start_ns = [0] * STAGE_COUNT
        self.end_ns = [0] * STAGE_COUNT
        self.frame_id = 0
        self.epoch = 0
        self.outcome = Outcome.FAILED
        self.stamp_source = StampSource.RECEIPT
        self.exit_head = -1
        self.detection_count = 0
        self.header_stamp_ns = 0
        self.header_frame_id = ""
        self.capture_stamp_ns = 0
        self.clock_offset_ns = 0
        self.clock_offset_error_ns = 0
        self.budget_ns = 0
        self.deadline_ns = 0
        self.left_ns = 0
        self.reason = ""

    def begin(self, buffer: FrameBuffer, budget_ns: int) -> None:
        """Start the record of the frame in ``buffer`` and clear what the last frame left."""
        for i in range(STAGE_COUNT):
            self.start_ns[i] = 0
            self.end_ns[i] = 0
        self.frame_id = buffer.frame_id
        self.epoch = buffer.epoch
        self.outcome = Outcome.FAILED
        self.stamp_source = buffer.stamp_source
        self.exit_head = -1
        self.detection_count = 0
        self.header_stamp_ns = buffer.header_stamp_ns
        self.header_frame_id = buffer.header_frame_id
        self.capture_stamp_ns = buffer.capture_stamp_ns
        self.clock_offset_ns = buffer.clock_offset_ns
        self.clock_offset_error_ns = buffer.clock_offset_error_ns
        self.budget_ns = budget_ns
        self.deadline_ns = buffer.capture_stamp_ns + budget_ns
        self.left_ns = 0
        self.reason = buffer.error
        self.start_ns[Stage.CAPTURE] = buffer.capture_start_ns
        self.end_ns[Stage.CAPTURE] = buffer.capture_end_ns

    def as_row(self) -> tuple[Any, ...]:
        """The record as one row of ``RECORD_DTYPE``."""
        return (
            self.frame_id,
            self.epoch,
            self.detection_count,
            int(self.outcome),
            int(self.stamp_source),
            self.exit_head,
            self.exit_count,
            0,
            self.header_stamp_ns,
            self.capture_stamp_ns,
            self.budget_ns,
            self.deadline_ns,
            self.left_ns,
            self.start_ns,
            self.end_ns,
        )
