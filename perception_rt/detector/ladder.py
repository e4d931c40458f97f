"""Which precision to run: each one measured, kept only if faster and about as good.

Goodness is agreement: AP at IoU 0.5 of what an exit finds, where the truth is what the same exit
of the float32 network finds under ONNX Runtime. It needs no labels, and it says what the precision
costs, not how good the network is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.errors import BackendError, PerceptionRtError
from perception_rt.detector.backend import PREPROCESS, Backend
from perception_rt.detector.model import Model
from perception_rt.detector.postprocess import Detections, Postprocessor

LADDER = ("fp32", "fp16", "int8")
MAX_AP_LOSS = 0.01
WARMUP_RUNS = 20
TIMED_RUNS = 200

_FASTER = 0.98  # of the median so far: less is within what two runs differ
_TRUTH_SCORE = 0.4
_FOUND_SCORE = 0.05
_NMS_IOU = 0.6
_MATCH_IOU = 0.5
_MAX_DET = 100
_RUN_TIMEOUT_NS = 10 * NS_PER_S

Found = NDArray[np.float32]
"""Of one image, float32 [n, 6]: l, t, r, b in source pixels, score, class id; best first."""


@dataclass(frozen=True)
class Measured:
    """A chain of all segments, measured.

    Attributes:
        p50_ns, p99_ns: from the start of preprocess to the end of the last segment.
        agreement: by exit, 0 to 1.
    """

    p50_ns: int
    p99_ns: int
    agreement: tuple[float, ...]


@dataclass(frozen=True)
class Step:
    """One rung: what was tried, found and decided."""

    precision: str
    measured: Measured | None
    kept: bool
    why: str


def climb(
    rungs: Sequence[str],
    attempt: Callable[[str], Measured],
    target_ns: int = 0,
    max_loss: float = MAX_AP_LOSS,
) -> tuple[str, list[Step]]:
    """Try precisions in order, stop at the first whose p99 meets the target.

    Args:
        rungs: precisions, the most exact one first; that one must work.
        attempt: builds and measures one.
        target_ns: latency that is good enough; 0: none, all are tried.
        max_loss: largest allowed ``1 - agreement`` of any exit.

    Returns:
        The kept precision, and every step that was taken.

    Raises:
        BackendError: the first rung already loses more than ``max_loss``.
        PerceptionRtError: what ``attempt`` raised for the first rung. A later one that fails is a
            step that was not kept.
    """
    best = rungs[0]
    steps: list[Step] = []
    best_p50_ns = 0
    for precision in rungs:
        try:
            measured = attempt(precision)
        except PerceptionRtError as error:
            if not steps:
                raise
            steps.append(Step(precision, None, False, str(error)))
            continue
        loss = 1 - min(measured.agreement)
        if not steps and loss > max_loss:
            raise BackendError(
                f"the engines at {precision} lose {loss:.3f} AP against ONNX Runtime, "
                f"{max_loss:g} is allowed, and nothing more exact is left to try: allow more, or "
                "use onnxruntime"
            )
        if loss > max_loss:
            steps.append(
                Step(precision, measured, False, f"loses {loss:.3f} AP, {max_loss:g} is allowed")
            )
            continue
        if steps and measured.p50_ns > _FASTER * best_p50_ns:
            steps.append(Step(precision, measured, False, f"not faster than {best}"))
            continue
        met = target_ns > 0 and measured.p99_ns <= target_ns
        why = f"faster than {best}" if steps else "the reference"
        if met:
            why += f", meets the target of {target_ns / NS_PER_MS:g} ms"
        steps.append(Step(precision, measured, True, why))
        best, best_p50_ns = precision, measured.p50_ns
        if met:
            break
    return best, steps


def measure(
    backend: Backend,
    model: Model,
    images: Sequence[NDArray[np.uint8]],
    reference: Sequence[Sequence[Found]],
    runs: int = TIMED_RUNS,
    progress: Callable[[int, int], None] | None = None,
) -> Measured:
    """Time a backend's whole chain and compare what it finds with the reference.

    Args:
        backend: idle.
        images: uint8 [height, width, 3], BGR; used again and again for ``runs``.
        reference: by exit, by image: see ``find_all``.
        progress: told runs done and runs in all.

    Raises:
        BackendError: the backend fails or does not answer.
    """
    durations_ns = []
    for i in range(-WARMUP_RUNS, runs):
        _run(backend, images[i % len(images)])
        if i >= 0:
            start_ns, end_ns = (
                backend.span_ns(PREPROCESS)[0],
                backend.span_ns(backend.exit_count - 1)[1],
            )
            durations_ns.append(end_ns - start_ns)
        if progress is not None:
            progress(i + WARMUP_RUNS + 1, runs + WARMUP_RUNS)
    found = find_all(backend, model, images)
    p50, p99 = np.quantile(np.array(durations_ns), [0.5, 0.99])
    agreement = tuple(agreement_ap50(truths, results) for truths, results in zip(reference, found))
    return Measured(int(p50), int(p99), agreement)


def find_all(
    backend: Backend, model: Model, images: Sequence[NDArray[np.uint8]]
) -> list[list[Found]]:
    """What every exit finds in every image, scores from 0.05 on: by exit, by image.

    Raises:
        BackendError: the backend fails or does not answer.
    """
    post = Postprocessor(model, _MAX_DET)
    out = Detections(_MAX_DET)
    found: list[list[Found]] = [[] for _ in range(backend.exit_count)]
    for image in images:
        _run(backend, image)
        for k, results in enumerate(found):
            n = post.run(
                backend.detections(k), backend.letterbox, _FOUND_SCORE, _NMS_IOU, _MAX_DET, out
            )
            columns = (out.boxes[:n], out.scores[:n, None], out.class_ids[:n, None])
            results.append(np.concatenate(columns, axis=1, dtype=np.float32))
    return found


def count_truths(reference: Sequence[Sequence[Found]]) -> int:
    """What counts as truth in ``agreement_ap50``, in the deepest exit."""
    return sum(int((found[:, 4] >= _TRUTH_SCORE).sum()) for found in reference[-1])


def agreement_ap50(truths: Sequence[Found], results: Sequence[Found]) -> float:
    """Average precision at IoU 0.5 over images and classes together; 1 where both find nothing.

    Truth is what ``truths`` scores 0.4 or more. A result matches the best free truth of its class;
    AP is the area under the interpolated precision-recall curve.
    """
    wanted = [truth[truth[:, 4] >= _TRUTH_SCORE] for truth in truths]
    total = sum(len(truth) for truth in wanted)
    if total == 0:
        surprises = sum(int((result[:, 4] >= _TRUTH_SCORE).sum()) for result in results)
        return 1.0 if surprises == 0 else 0.0
    free = [np.ones(len(truth), np.bool_) for truth in wanted]
    rows = [(float(row[4]), i, row) for i, result in enumerate(results) for row in result]
    rows.sort(key=lambda item: -item[0])
    hits = np.zeros(len(rows))
    for n, (_, i, row) in enumerate(rows):
        overlap = np.where(free[i] & (wanted[i][:, 5] == row[5]), _iou(row, wanted[i]), 0.0)
        if len(overlap) and overlap.max() >= _MATCH_IOU:
            hits[n] = 1
            free[i][overlap.argmax()] = False
    if not rows:
        return 0.0
    recall = np.cumsum(hits) / total
    precision = np.maximum.accumulate((np.cumsum(hits) / np.arange(1, len(rows) + 1))[::-1])[::-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def _iou(row: Found, others: Found) -> NDArray[np.float32]:
    low = np.maximum(row[:2], others[:, :2])
    high = np.minimum(row[2:4], others[:, 2:4])
    inter = np.prod(np.maximum(high - low, 0), axis=1)
    areas = np.prod(others[:, 2:4] - others[:, :2], axis=1) + np.prod(row[2:4] - row[:2])
    return np.asarray(inter / np.maximum(areas - inter, 1e-9), np.float32)


def _run(backend: Backend, image: NDArray[np.uint8]) -> None:
    last = backend.exit_count - 1
    end_ns = time.monotonic_ns() + _RUN_TIMEOUT_NS
    backend.begin(image)
    for k in range(last + 1):
        backend.launch(k)
    while not backend.ready(last):
        if not backend.wait_until(end_ns) and time.monotonic_ns() >= end_ns:
            raise BackendError(f"exit {last} was not ready after {_RUN_TIMEOUT_NS // NS_PER_S} s")
