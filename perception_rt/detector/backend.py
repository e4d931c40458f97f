"""The protocol between the deadline thread and whatever runs the network.

The same for ONNX Runtime on a CPU thread and for TensorRT on a GPU stream: work is launched in
order, runs in order, and cannot be recalled once launched.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perception_rt.detector.preprocess import Letterbox

PREPROCESS = -1
"""The index that stands for preprocess where a segment index is asked for."""


class Backend(Protocol):
    """Runs preprocess and segments in order, one frame at a time. Called from one thread only
    (the deadline thread).

    A fault inside a run (exception, NaN, infinity) is raised as BackendError by the next
    ``ready``, ``wait_until`` or ``detections`` of that frame, once; the backend is usable again
    for the next ``begin``.
    """

    @property
    def exit_count(self) -> int:
        """Number of segments, and so of exit heads."""

    @property
    def look_ahead(self) -> int:
        """Segments that may be launched behind the one in flight: 0, or 1 where an idle gap
        between two segments costs more than a segment that is not needed.
        """

    @property
    def double_buffered(self) -> bool:
        """True when ``begin`` may be called while segments of the frame before are in flight."""

    @property
    def progress(self) -> int:
        """Counter that grows whenever the running thread ends a step or idles on its poll."""

    def begin(self, image: NDArray[np.uint8]) -> None:
        """Start a frame: queue the preprocess of ``image`` (uint8 [height, width, 3], BGR) into
        the input tensor.

        The image must stay untouched until ``ready(PREPROCESS)``. Results of the frame before are
        gone.

        Raises:
            BackendError: something is still in flight (``drain`` first); with ``double_buffered``,
                something of the frame before the one before.
        """

    def launch(self, k: int) -> None:
        """Queue segment ``k`` of the present frame; segments are launched in order 0, 1, 2, ..."""

    def ready(self, k: int) -> bool:
        """True when segment ``k`` (or PREPROCESS) of the present frame has finished; never
        blocks.
        """

    def wait_until(self, t_ns: int) -> bool:
        """Sleep until something in flight finishes (True) or CLOCK_MONOTONIC reaches ``t_ns``
        (False).

        Returns True at once when something finished since the last call that the caller has not
        been told of; with nothing in flight it returns False at once.
        """

    def drain(self, t_ns: int) -> bool:
        """Wait, at most until ``t_ns``, until nothing is in flight; True when that is so. Drops
        unstarted work.
        """

    def detections(self, k: int) -> NDArray[np.float32]:
        """The detection tensor of exit ``k``, float32 [A, 4 + C]: l, t, r, b in input pixels,
        then scores.

        A view that stays valid until segment ``k`` is launched again.

        Raises:
            BackendError: exit ``k`` is not ready, or holds NaN or infinity.
        """

    def span_ns(self, k: int) -> tuple[int, int]:
        """Start and end instant (CLOCK_MONOTONIC) of segment ``k`` or PREPROCESS in the present
        frame; 0 for what is not known yet.
        """

    def previous_end_ns(self) -> int:
        """When the last launched segment of the frame before the present one ended
        (CLOCK_MONOTONIC); 0 while it is in flight, or where there was none.
        """

    @property
    def letterbox(self) -> Letterbox:
        """How the present frame's pixels were mapped to the input tensor."""

    def close(self, timeout_s: float = 1.0) -> bool:
        """Stop; False when the running thread did not return in time (it is left behind)."""
