"""Video files as a frame source."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from perception_rt.capture.decode import decoder_fault
from perception_rt.capture.pacing import Pacer
from perception_rt.capture.source import SourceEvent
from perception_rt.core.clock import NS_PER_S
from perception_rt.core.config import SourceConfig
from perception_rt.core.errors import InputError
from perception_rt.core.frame import FrameBuffer, StampSource

MAX_FPS = 1000.0

HEADER_FRAME_ID = "camera"

RETRY_NS = NS_PER_S
"""Between two attempts to open a looped file that has gone."""


class VideoSource:
    """Plays a video file at its own frame rate.

    The capture stamp is the scheduled instant (SIMULATED) and decoding counts against it. A file
    has no ROS stamps: the header stamp of frame n is n * period, from 0 in every lap, and the
    header's frame_id is ``camera``. With ``loop`` the first frame follows the last by one period,
    and a JUMP comes between them. A lap without a frame (the file was deleted or truncated) is
    LOST: the file is opened again every ``RETRY_NS``, and its first frame is then due at once.

    Args:
        config: ``uri`` is the file, with ``loop`` and ``rate``.
        now, sleep: clock (CLOCK_MONOTONIC, nanoseconds) and sleep (seconds).
    """

    stamp_source = StampSource.SIMULATED

    def __init__(
        self,
        config: SourceConfig,
        now: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path = config.uri
        self._loop = config.loop
        self._pacer = Pacer(config.rate, now, sleep)
        self._capture: cv2.VideoCapture | None = None
        self._period_ns = 0
        self._index = 0
        self._ended = False
        self._retry_ns: int | None = None  # the next attempt, while the file is lost
        self._sample: NDArray[np.uint8] = np.zeros((0, 0, 3), np.uint8)

    def open(self) -> None:
        """Open the file and decode its first frame.

        Raises:
            InputError: no such file, not a video, no frame in it, no frame rate in it.
        """
        if not Path(self._path).is_file():
            raise InputError(f"no such video: {self._path}")
        capture = self._reopen()
        ok, image = capture.read()
        if not ok or image is None:
            raise InputError(
                f"{self._path} is not a video that OpenCV can decode; convert it to H.264 in MP4"
            )
        fps = capture.get(cv2.CAP_PROP_FPS)
        if not math.isfinite(fps) or not 0 < fps <= MAX_FPS:
            raise InputError(
                f"{self._path} states no usable frame rate ({fps:g}); set one, as with `ffmpeg -r`"
            )
        self._period_ns = round(NS_PER_S / fps)
        self._sample = np.asarray(image, np.uint8)
        self._reopen()

    def start(self, start_ns: int) -> None:
        """Begin with the first frame, due at ``start_ns``."""
        self._pacer.start(start_ns)
        if self._index or self._ended or self._retry_ns is not None:
            self._reopen()

    def read(self, buffer: FrameBuffer, until_ns: int) -> SourceEvent:
        """Wait for the next frame and decode it into ``buffer``; see ``Source.read``."""
        if self._ended:
            return SourceEvent.ENDED
        if self._retry_ns is not None:
            if not self._pacer.wait(self._retry_ns, until_ns):
                return SourceEvent.LOST
            self._reopen()
            # The time without a file is not caught up on.
            self._pacer.start(self._pacer.now())
        offset_ns = self._index * self._period_ns
        due_ns = self._pacer.due_ns(offset_ns)
        if not self._pacer.wait(due_ns, until_ns):
            return SourceEvent.TIMEOUT
        assert self._capture is not None, "open() comes before read()"
        start_ns = self._pacer.now()
        height, width = self._sample.shape[:2]
        try:
            ok, image = self._capture.read(buffer.reserve(height, width))
            if not ok:
                return self._end_of_lap(offset_ns)
            # The reserved view itself, unless the size changed within the file.
            buffer.image = np.asarray(image, np.uint8)
            buffer.error = ""
        except Exception as error:  # noqa: BLE001  (a decoder fails in any way there is)
            buffer.error = decoder_fault(error)
        buffer.stamp_source = StampSource.SIMULATED
        buffer.capture_stamp_ns = due_ns
        buffer.header_stamp_ns = offset_ns
        buffer.header_frame_id = HEADER_FRAME_ID
        buffer.capture_start_ns = start_ns
        buffer.capture_end_ns = self._pacer.now()
        self._index += 1
        return SourceEvent.FRAME

    def sample(self, buffer: FrameBuffer) -> bool:
        """Copy the first frame into ``buffer``."""
        if self._sample.size == 0:
            return False
        np.copyto(buffer.reserve(*self._sample.shape[:2]), self._sample)
        buffer.error = ""
        return True

    def close(self) -> None:
        """Close the file."""
        if self._capture is not None:
            self._capture.release()
            self._capture = None

    def _end_of_lap(self, length_ns: int) -> SourceEvent:
        # The end shows only when the frame after the last one is asked for, one period after the
        # last: exactly when the next lap's first frame is due.
        if not self._loop:
            self._ended = True
            return SourceEvent.ENDED
        if length_ns == 0:
            self._retry_ns = self._pacer.now() + RETRY_NS
            return SourceEvent.LOST
        self._pacer.next_lap(length_ns)
        self._reopen()
        return SourceEvent.JUMP

    def _reopen(self) -> cv2.VideoCapture:
        # Opened again rather than sought back: seeking to 0 is not exact in every container.
        if self._capture is not None:
            self._capture.release()
        self._capture = cv2.VideoCapture(self._path)
        self._index = 0
        self._ended = False
        self._retry_ns = None
        return self._capture
