"""The protocol of every frame source."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from perception_rt.core.frame import FrameBuffer, StampSource


class SourceEvent(IntEnum):
    """What ``Source.read`` came back with."""

    FRAME = 0
    """``buffer`` holds a frame (or, with ``buffer.error`` set, a frame that could not be
    decoded).
    """
    TIMEOUT = 1
    """Nothing by the given instant."""
    JUMP = 2
    """Source time jumped back (a loop of a bag): state that relates frames in time is to be
    reset.
    """
    LOST = 3
    """The source died; ``read`` may be called again and retries by itself."""
    ENDED = 4
    """No frame will come any more."""


class Source(Protocol):
    """Delivers frames, one at a time, to one capture thread."""

    @property
    def stamp_source(self) -> StampSource:
        """Where its capture stamps come from."""

    def open(self) -> None:
        """Check everything that can be checked and get ready to deliver; slow, not on the
        real-time path.

        Raises:
            InputError: no such file, nothing in it, no image topic (names what is there), or
                truncated.
            UnavailableError: device or ROS not there.
        """

    def start(self, start_ns: int) -> None:
        """Begin to deliver: a recorded source schedules its first frame at ``start_ns``
        (CLOCK_MONOTONIC).
        """

    def read(self, buffer: FrameBuffer, until_ns: int) -> SourceEvent:
        """Wait for the next frame and fill ``buffer``: image, header, capture stamp and capture
        span.

        Sets everything in ``buffer`` but ``frame_id``, ``epoch`` and ``clock_offset_*``. Returns
        at ``until_ns`` (CLOCK_MONOTONIC) at the latest, give or take a decode. An undecodable
        frame is a FRAME with ``buffer.error`` set.
        """

    def sample(self, buffer: FrameBuffer) -> bool:
        """Decode the first frame into ``buffer`` for warm-up, outside the schedule; False where
        that is impossible.
        """

    def close(self) -> None:
        """Release files, topics, devices. May be opened again."""
