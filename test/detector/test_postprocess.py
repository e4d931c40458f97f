from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from perception_rt.core.errors import BackendError
from perception_rt.detector.model import Model
from perception_rt.detector.postprocess import TOP_K, Detections, Postprocessor
from perception_rt.detector.preprocess import Letterbox, letterbox_geometry

F32 = NDArray[np.float32]
SAME = letterbox_geometry(32, 32, 32, 32)
"""Source pixels are input pixels."""


def tensor(*rows: tuple[float, ...], anchors: int = 20, classes: int = 3) -> F32:
    """Detection tensor whose first anchors are ``rows`` (l, t, r, b, score of class 0, 1, ...)."""
    out = np.zeros((anchors, 4 + classes), np.float32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def decode(
    model: Model,
    data: F32,
    letterbox: Letterbox = SAME,
    confidence: float = 0.35,
    nms: float = 0.6,
    max_det: int = 100,
) -> list[tuple[list[float], float, int]]:
    """(box, score, class) of each detection, rounded for comparison with literals."""
    out = Detections(100)
    count = Postprocessor(model, 100).run(data, letterbox, confidence, nms, max_det, out)
    assert count == out.count
    return [
        (
            [round(float(v), 3) for v in out.boxes[i]],
            round(float(out.scores[i]), 3),
            int(out.class_ids[i]),
        )
        for i in range(count)
    ]


def test_nothing_above_the_threshold_is_an_empty_answer(tiny: Model) -> None:
    assert decode(tiny, tensor()) == []
    assert decode(tiny, tensor((1, 1, 5, 5, 0.35)), confidence=0.35) == []
    assert decode(tiny, tensor(), confidence=0.0) == []


def test_an_empty_answer_clears_the_one_before(tiny: Model) -> None:
    out = Detections(10)
    postprocessor = Postprocessor(tiny, 10)
    assert postprocessor.run(tensor((1, 1, 5, 5, 0.9)), SAME, 0.5, 0.6, 10, out) == 1
    assert postprocessor.run(tensor(), SAME, 0.5, 0.6, 10, out) == 0
    assert out.count == 0


def test_best_first_with_the_best_class_of_each_anchor(tiny: Model) -> None:
    data = tensor((1, 1, 5, 5, 0.4, 0.5, 0.1), (10, 10, 20, 20, 0.0, 0.1, 0.8))
    assert decode(tiny, data) == [
        ([10, 10, 20, 20], 0.8, 2),
        ([1, 1, 5, 5], 0.5, 1),
    ]


def test_overlapping_boxes_of_one_class_leave_the_best(tiny: Model) -> None:
    # IoU of the first two: 90 / 110; of the first and third: 50 / 150
    data = tensor((0, 0, 10, 10, 0.7), (0, 1, 10, 11, 0.9), (0, 6, 10, 16, 0.8))
    assert decode(tiny, data) == [([0, 1, 10, 11], 0.9, 0), ([0, 6, 10, 16], 0.8, 0)]
    assert len(decode(tiny, data, nms=0.9)) == 3
    assert len(decode(tiny, data, nms=0.3)) == 1


def test_overlapping_boxes_of_two_classes_both_stay(tiny: Model) -> None:
    data = tensor((0, 0, 10, 10, 0.7), (0, 0, 10, 10, 0.0, 0.9))
    assert [(s, c) for _, s, c in decode(tiny, data, nms=0.0)] == [(0.9, 1), (0.7, 0)]


@pytest.mark.parametrize(("nms", "kept"), [(0.0, 1), (0.49, 1), (0.51, 2), (1.0, 2)])
def test_the_nms_threshold_is_an_iou(tiny: Model, nms: float, kept: int) -> None:
    data = tensor((0, 0, 10, 10, 0.7), (0, 0, 10, 5, 0.9))  # IoU 0.5
    assert len(decode(tiny, data, nms=nms)) == kept


def test_equal_boxes_survive_only_at_threshold_one(tiny: Model) -> None:
    data = tensor((1.1, 2.3, 7.7, 9.9, 0.7), (1.1, 2.3, 7.7, 9.9, 0.9))
    assert len(decode(tiny, data, nms=0.99)) == 1
    assert len(decode(tiny, data, nms=1.0)) == 2


def test_a_suppressed_box_suppresses_nothing(tiny: Model) -> None:
    # a row of boxes, each with 1/3 of IoU to the next: the middle one goes, the last stays
    data = tensor((0, 0, 10, 10, 0.9), (5, 0, 15, 10, 0.8), (10, 0, 20, 10, 0.7))
    assert [b[0] for b, _, _ in decode(tiny, data, nms=0.3)] == [0, 10]


def test_equal_scores_keep_the_order_of_anchors(tiny: Model) -> None:
    data = tensor(*[(3 * i, 0, 3 * i + 2, 2, 0.5) for i in range(6)])
    assert [b[0] for b, _, _ in decode(tiny, data)] == [0, 3, 6, 9, 12, 15]


def test_max_det_and_the_room_in_the_output_bound_the_answer(tiny: Model) -> None:
    data = tensor(*[(3 * i, 0, 3 * i + 2, 2, 0.9 - i / 100) for i in range(8)])
    assert [s for _, s, _ in decode(tiny, data, max_det=3)] == [0.9, 0.89, 0.88]
    assert decode(tiny, data, max_det=0) == []
    small = Detections(5)
    assert Postprocessor(tiny, 100).run(data, SAME, 0.1, 0.6, 100, small) == 5


def test_boxes_come_back_in_source_pixels(nanodet: Model) -> None:
    wide = letterbox_geometry(1920, 1080, 416, 416)  # 416 x 234, 91 from the top
    data = tensor((104, 149.5, 208, 208, 0.9), anchors=3549, classes=80)
    ((box, _, _),) = decode(nanodet, data, wide)
    assert box == pytest.approx([480, 270, 960, 540], abs=1e-3)


def test_boxes_are_clipped_to_the_image_and_none_is_given_for_the_border(nanodet: Model) -> None:
    wide = letterbox_geometry(1920, 1080, 416, 416)
    data = tensor(
        (-50, 0, 500, 416, 0.9),  # larger than all
        (10, 0, 20, 90, 0.8),  # in the border above the image
        (10, 0, 20, 91, 0.8),  # touches its upper edge
        (10, 325, 20, 400, 0.8),  # below its lower edge
        (-20, 100, -5, 110, 0.8),  # left of it
        (30, 100, 20, 110, 0.8),  # right before left
        (30, 110, 40, 110, 0.8),  # no height
        anchors=3549,
        classes=80,
    )
    assert decode(nanodet, data, wide) == [([0, 0, 1920, 1080], 0.9, 0)]


SIDES = st.integers(1, 5000)


@given(SIDES, SIDES, st.integers(0, 2**32 - 1))
def test_every_box_lies_inside_the_image_and_has_area(
    tiny: Model, width: int, height: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    data = rng.uniform(0, 1, (20, 7)).astype(np.float32)
    data[:, :4] = rng.uniform(-60, 90, (20, 4))
    data[0, :4] = -3e38, -3e38, 3e38, 3e38
    data[0, 4] = 1
    out = Detections(20)
    box = letterbox_geometry(width, height, 32, 32)
    count = Postprocessor(tiny, 20).run(data, box, 0.1, 0.9, 20, out)
    assert count >= 1
    left, top, right, bottom = out.boxes[:count].T
    assert left.min() >= 0
    assert top.min() >= 0
    assert (left < right).all()
    assert (top < bottom).all()
    assert (right <= width).all()
    assert (bottom <= height).all()
    assert list(out.boxes[0]) == pytest.approx([0, 0, width, height], abs=1e-3)


@given(
    st.sampled_from(["nan", "inf", "-inf"]), st.integers(0, 19), st.integers(0, 6), st.booleans()
)
def test_nan_and_infinity_anywhere_are_a_fault_never_no_objects(
    tiny: Model, value: str, row: int, column: int, empty: bool
) -> None:
    data = tensor() if empty else tensor((1, 1, 5, 5, 0.9))
    data[row, column] = float(value)
    out = Detections(10)
    out.count = 7
    with pytest.raises(BackendError, match="NaN or infinity"):
        Postprocessor(tiny, 10).run(data, SAME, 0.35, 0.6, 10, out)
    assert out.count == 0


def iou(a: list[int], b: list[int]) -> float:
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]))
    inter = width * height
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return inter / (areas - inter)


COORDINATE = st.integers(0, 31)
ROW = st.tuples(COORDINATE, COORDINATE, COORDINATE, COORDINATE, st.integers(0, 2))


@settings(max_examples=300)
@given(
    st.lists(ROW, min_size=1, max_size=20),
    st.sampled_from([0.0, 0.173, 0.3719, 0.617, 0.913]),
    st.randoms(use_true_random=False),
)
def test_the_same_boxes_stay_as_in_a_plain_greedy_loop(
    tiny: Model, rows: list[tuple[int, int, int, int, int]], nms: float, random: object
) -> None:
    scores = [0.4 + 0.5 * i / len(rows) for i in range(len(rows))]
    random.shuffle(scores)  # type: ignore[attr-defined]
    boxes, data = [], tensor()
    for i, (x0, y0, x1, y1, class_id) in enumerate(rows):
        box = [min(x0, x1), min(y0, y1), max(x0, x1) + 1, max(y0, y1) + 1]
        boxes.append(box)
        data[i, :4] = box
        data[i, 4 + class_id] = scores[i]
    kept: list[int] = []
    for i in sorted(range(len(rows)), key=lambda i: -scores[i]):
        if all(rows[j][4] != rows[i][4] or iou(boxes[i], boxes[j]) <= nms for j in kept):
            kept.append(i)
    found = decode(tiny, data, nms=nms)
    assert [b for b, _, _ in found] == [boxes[i] for i in kept]
    assert [c for _, _, c in found] == [rows[i][4] for i in kept]


def crowd(same_class: bool, side: float) -> F32:
    """All 3549 anchors above any threshold."""
    rng = np.random.default_rng(3)
    data = np.zeros((3549, 84), np.float32)
    data[:, :2] = rng.uniform(0, 400, (3549, 2))
    data[:, 2:4] = data[:, :2] + side
    data[:, 4:] = rng.uniform(0.4, 0.6, (3549, 80))
    if same_class:
        data[:, 4] += 0.3
    return data


@pytest.mark.parametrize("same_class", [True, False])
@pytest.mark.parametrize("side", [0.5, 8, 300])
def test_a_crowd_is_cut_to_the_best_top_k_before_nms(
    nanodet: Model, same_class: bool, side: float
) -> None:
    data = crowd(same_class, side)
    box = letterbox_geometry(416, 416, 416, 416)
    out = Detections(1000)
    count = Postprocessor(nanodet, 50, top_k=64).run(data, box, 0.0, 1.0, 1000, out)
    best = np.sort(data[:, 4:].max(axis=1))[::-1]
    assert count == 64
    np.testing.assert_array_equal(out.scores[:64], best[:64])


def test_top_k_is_never_below_max_det(nanodet: Model) -> None:
    out = Detections(300)
    postprocessor = Postprocessor(nanodet, 300, top_k=10)
    box = letterbox_geometry(416, 416, 416, 416)
    assert postprocessor.run(crowd(True, 0.5), box, 0.0, 1.0, 300, out) == 300
    assert TOP_K == 256


def test_the_worst_case_needs_little_memory(nanodet: Model) -> None:
    data = crowd(False, 8)
    box = letterbox_geometry(1920, 1080, 416, 416)
    out = Detections(100)
    postprocessor = Postprocessor(nanodet, 100)
    postprocessor.run(data, box, 0.0, 0.6, 100, out)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        postprocessor.run(data, box, 0.0, 0.6, 100, out)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # index arrays of 3549 candidates and the scores of 256 of them; one pairwise matrix is 262,144
    assert peak - before < 200_000
    assert after - before < 2000
