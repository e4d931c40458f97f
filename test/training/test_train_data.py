"""Training views and what is drawn; PyTorch is not needed for them."""

from __future__ import annotations

import exit_graph as ex
import numpy as np
import pytest
import train_data as td
from hypothesis import given, settings
from hypothesis import strategies as st


def sample(boxes, classes, source=0):
    flags = np.zeros((len(boxes), ex.CLASSES), bool)
    flags[np.arange(len(boxes)), classes] = True
    return td.Sample(
        np.zeros((380, 640, 3), np.uint8),
        np.array(boxes, np.float32).reshape(-1, 4),
        flags,
        np.ones(len(boxes), bool),
        np.ones(ex.CLASSES, bool),
        source,
    )


def test_labels_become_pixels(tmp_path):
    (tmp_path / "labels/train").mkdir(parents=True)
    (tmp_path / "labels/train/a.txt").write_text("0 0.5 0.5 0.5 0.25\n3 0.1 0.1 0.2 0.2\n")
    indices, boxes = td.carla_boxes(tmp_path, "a", (100, 200, 3))
    assert indices.tolist() == [0, 3]
    assert boxes.ravel().tolist() == pytest.approx([50, 37.5, 150, 62.5, 0, 0, 40, 20], abs=1e-5)


def test_a_rare_class_is_drawn_more_often():
    # the motorcycle is in 1 of 30 pictures: sqrt(0.3 * 30) = 3 times
    samples = [sample([[0, 0, 9, 9]], [td.CAR]) for _ in range(29)]
    shares = td.draw_shares([*samples, sample([[0, 0, 9, 9]], [td.MOTORCYCLE])])
    assert shares.sum() == pytest.approx(1)
    assert shares[-1] / shares[0] == pytest.approx(3)


def test_sources_keep_their_shares():
    box = [[0, 0, 9, 9]]
    samples = [sample(box, [td.PERSON], s) for s in (0, 0, 0, 1, 2, 2)]
    shares = td.draw_shares(samples)
    assert [shares[:3].sum(), shares[3], shares[4:].sum()] == pytest.approx([0.55, 0.3, 0.15])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_view_moves_its_boxes_with_its_pixels(seed):
    one = sample([[200, 120, 300, 220]], [td.CAR])
    one.image[120:220, 200:300] = 255
    image, boxes, classes, _sure = td.view(one, np.random.default_rng(seed))
    assert image.shape == (ex.HEIGHT, ex.WIDTH, 3)
    if not len(boxes):
        return
    assert classes[0, td.CAR]
    left, top, right, bottom = boxes[0]
    assert 0 <= left < right <= ex.WIDTH
    assert 0 <= top < bottom <= ex.HEIGHT
    inner = image[round(top) + 3 : round(bottom) - 3, round(left) + 3 : round(right) - 3]
    outer = image.copy()
    outer[
        max(round(top) - 3, 0) : round(bottom) + 3, max(round(left) - 3, 0) : round(right) + 3
    ] = 0
    # however it is relit, the white object is brighter than the grey border
    assert inner.min(initial=255) > outer.max()
