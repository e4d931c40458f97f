"""Detection tensor to detections: threshold, fixed top-k, class-aware NMS, source-image pixels.

The same for every exit head of every backend. The work is bounded whatever the network says: one
pass over the tensor, then at most ``top_k`` candidates enter a pairwise comparison.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.errors import BackendError
from perception_rt.detector.model import Model
from perception_rt.detector.preprocess import Letterbox

TOP_K = 256
"""Candidates that may enter NMS unless told otherwise."""


class Detections:
    """Detections of one frame, best first, in reused arrays; only the first ``count`` rows count.

    Attributes:
        boxes: float32 [max_det, 4]: left, top, right, bottom in source pixels, inside the image.
        scores: float32 [max_det], descending.
        class_ids: int32 [max_det].
        count: detections found; 0 means that the network looked and saw nothing.
    """

    __slots__ = ("boxes", "class_ids", "count", "scores")

    def __init__(self, max_det: int) -> None:
        self.boxes: NDArray[np.float32] = np.zeros((max_det, 4), np.float32)
        self.scores: NDArray[np.float32] = np.zeros(max_det, np.float32)
        self.class_ids: NDArray[np.int32] = np.zeros(max_det, np.int32)
        self.count = 0


class Postprocessor:
    """Turns the detection tensor of one exit into ``Detections``. Not for use from two threads.

    Median time at 3549 anchors, 80 classes and top_k 256, on a 2-core VM: 0.45 ms with few
    candidates, 1.0 ms at worst (every anchor above the threshold, ``max_det`` boxes kept).
    It grows with the square of ``top_k``: 7.7 ms in the pairwise part alone at 1000.

    Args:
        model: gives the number of anchors and classes.
        max_det: largest ``max_det`` that ``run`` will be asked for; ``top_k`` is never below it.
        top_k: candidates with the highest scores that enter NMS.
    """

    def __init__(self, model: Model, max_det: int, top_k: int = TOP_K) -> None:
        anchors = max(s.exit.anchors for s in model.segments)
        self._top_k = k = min(max(top_k, max_det), anchors)
        self._finite = np.zeros((anchors, 4 + model.classes), np.bool_)
        self._best = np.zeros(anchors, np.float32)
        self._pairs = np.zeros((3, k * k), np.float32)
        self._pair_flags = np.zeros((2, k * k), np.bool_)
        self._columns = np.zeros((4, k), np.float32)
        self._areas = np.zeros(k, np.float32)
        self._dead = np.zeros(k, np.bool_)

    def run(
        self,
        tensor: NDArray[np.float32],
        letterbox: Letterbox,
        confidence_threshold: float,
        nms_threshold: float,
        max_det: int,
        out: Detections,
    ) -> int:
        """Decode one exit into ``out`` and return the number of detections.

        An anchor counts with its best class only, when that score is above
        ``confidence_threshold``. Boxes are clipped to the image; one without area there (wholly in
        the border) is dropped. A box is dropped when a better one of its class overlaps it by an
        IoU above ``nms_threshold``.

        Args:
            tensor: float32 [A, 4 + C]: l, t, r, b in input pixels, then scores.
            letterbox: how the frame was mapped to the input.
            confidence_threshold, nms_threshold: from 0 to 1.
            max_det: most detections wanted; no more than ``out`` holds are given.
            out: overwritten.

        Raises:
            BackendError: ``tensor`` holds NaN or infinity; ``out.count`` is then 0.
        """
        out.count = 0
        finite = self._finite[: tensor.shape[0]]
        np.isfinite(tensor, out=finite)
        if not finite.all():
            raise BackendError(
                "the detection tensor holds NaN or infinity: this frame has no answer"
            )
        best = self._best[: tensor.shape[0]]
        np.maximum.reduce(tensor[:, 4:], axis=1, out=best)
        candidates = np.flatnonzero(best > confidence_threshold)
        if candidates.size > self._top_k:
            cut = candidates.size - self._top_k
            candidates = candidates[np.argpartition(best[candidates], cut)[cut:]]
        candidates = candidates[np.lexsort((candidates, -best[candidates]))]
        columns = self._to_source(tensor, candidates, letterbox)
        inside = (columns[2] > columns[0]) & (columns[3] > columns[1])
        if not inside.all():
            candidates = candidates[inside]
            columns[:, : candidates.size] = columns[:, inside]
        n = candidates.size
        if n == 0:
            return 0
        class_ids = np.argmax(tensor[candidates, 4:], axis=1)
        overlaps = self._overlaps(n, class_ids, nms_threshold)

        limit = min(max_det, out.scores.size)
        dead = self._dead[:n]
        dead.fill(False)
        count = 0
        for i in range(n):
            if count == limit:
                break
            if dead[i]:
                continue
            out.boxes[count] = columns[:, i]
            out.scores[count] = best[candidates[i]]
            out.class_ids[count] = class_ids[i]
            count += 1
            np.logical_or(dead, overlaps[i], out=dead)
        out.count = count
        return count

    def _to_source(
        self, tensor: NDArray[np.float32], rows: NDArray[np.intp], letterbox: Letterbox
    ) -> NDArray[np.float32]:
        """Boxes of ``rows``, float32 [4, n]: l, t, r, b in source pixels, clipped to the image."""
        columns = self._columns[:, : rows.size]
        for axis, offset, new, src in (
            (0, letterbox.left, letterbox.new_w, letterbox.src_w),
            (1, letterbox.top, letterbox.new_h, letterbox.src_h),
        ):
            for c in (axis, axis + 2):
                column = columns[c]
                # Clipped before it is scaled, so that no finite value can overflow.
                np.clip(tensor[rows, c], offset, offset + new, out=column)
                np.subtract(column, offset, out=column)
                np.multiply(column, src / new, out=column)
                np.minimum(column, src, out=column)
        return columns

    def _overlaps(
        self, n: int, class_ids: NDArray[np.intp], threshold: float
    ) -> NDArray[np.bool_]:
        """Bool [n, n]: True where two boxes of one class have an IoU above ``threshold``.

        IoU > t is inter / (a + b - inter) > t, which is inter > (a + b) * t / (1 + t): no division
        for each pair.
        """
        width, height, other = (pairs[: n * n].reshape(n, n) for pairs in self._pairs)
        overlap, same = (flags[: n * n].reshape(n, n) for flags in self._pair_flags)
        left, top, right, bottom = self._columns[:, :n]
        np.minimum(right[:, None], right, out=width)
        np.maximum(left[:, None], left, out=other)
        np.subtract(width, other, out=width)
        # One side clamped is enough: a negative height then makes the product negative or zero.
        np.maximum(width, 0, out=width)
        np.minimum(bottom[:, None], bottom, out=height)
        np.maximum(top[:, None], top, out=other)
        np.subtract(height, other, out=height)
        np.multiply(width, height, out=width)
        areas = self._areas[:n]
        np.multiply(right - left, bottom - top, out=areas)
        np.multiply(areas, threshold / (1 + threshold), out=areas)
        np.add(areas[:, None], areas, out=other)
        np.greater(width, other, out=overlap)
        np.equal(class_ids[:, None], class_ids, out=same)
        return np.logical_and(overlap, same, out=overlap)
