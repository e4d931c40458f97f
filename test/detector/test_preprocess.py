from __future__ import annotations

import tracemalloc

import cv2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perception_rt.core.errors import InputError
from perception_rt.detector.model import Model
from perception_rt.detector.preprocess import Letterbox, Preprocessor, letterbox_geometry

SIDE = st.one_of(st.integers(1, 4), st.integers(1, 20_000))
DST = st.sampled_from([1, 2, 31, 32, 416, 640])


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ((1920, 1080), (416, 416), (416, 234, 0, 91)),
        ((1080, 1920), (416, 416), (234, 416, 91, 0)),
        ((416, 416), (416, 416), (416, 416, 0, 0)),
        ((1, 1), (416, 416), (416, 416, 0, 0)),
        ((1, 20_000), (416, 416), (1, 416, 207, 0)),
        ((20_000, 1), (416, 416), (416, 1, 0, 207)),
        ((640, 480), (320, 192), (256, 192, 32, 0)),
        ((3, 2), (416, 416), (416, 277, 0, 69)),
        # 416 * 3 / 832 = 1.5 rounds up
        ((832, 3), (416, 416), (416, 2, 0, 207)),
    ],
)
def test_geometry_of_known_sizes(
    src: tuple[int, int], dst: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    box = letterbox_geometry(*src, *dst)
    assert box == Letterbox(*src, *dst, *expected)


@given(SIDE, SIDE, DST, DST)
@example(1, 20_000, 416, 416)
@example(20_000, 1, 1, 1)
def test_geometry_fits_fills_one_side_and_is_centred(sw: int, sh: int, dw: int, dh: int) -> None:
    box = letterbox_geometry(sw, sh, dw, dh)
    assert 1 <= box.new_w <= dw
    assert 1 <= box.new_h <= dh
    assert box.new_w == dw or box.new_h == dh
    assert 0 <= dw - box.new_w - 2 * box.left <= 1
    assert 0 <= dh - box.new_h - 2 * box.top <= 1
    scale = min(dw / sw, dh / sh)
    assert abs(box.new_w - sw * scale) <= max(0.5, 1 - sw * scale) + 1e-6
    assert abs(box.new_h - sh * scale) <= max(0.5, 1 - sh * scale) + 1e-6


@given(SIDE, SIDE, DST, DST, st.floats(0, 1), st.floats(0, 1))
def test_forward_and_back_is_the_same_point_and_stays_inside(
    sw: int, sh: int, dw: int, dh: int, fx: float, fy: float
) -> None:
    box = letterbox_geometry(sw, sh, dw, dh)
    x, y = fx * sw, fy * sh
    xi, yi = box.to_input(x, y)
    assert box.left - 1e-6 <= xi <= box.left + box.new_w + 1e-6
    assert box.top - 1e-6 <= yi <= box.top + box.new_h + 1e-6
    xs, ys = box.to_source(xi, yi)
    # half a pixel is what matters; the integers are the same, so only rounding of floats is left
    assert abs(xs - x) < 1e-6 * sw
    assert abs(ys - y) < 1e-6 * sh


@given(SIDE, SIDE, DST, DST)
def test_whole_input_pixels_map_back_to_within_half_a_pixel_of_either_grid(
    sw: int, sh: int, dw: int, dh: int
) -> None:
    box = letterbox_geometry(sw, sh, dw, dh)
    for column in {box.left, box.left + box.new_w // 2, box.left + box.new_w - 1}:
        x, _ = box.to_source(column + 0.5, box.top + 0.5)
        assert 0 <= x <= sw
        # rounding to a source pixel and going forward again moves by half a source pixel at most
        again, _ = box.to_input(np.floor(x) + 0.5, 0.5)
        assert abs(again - (column + 0.5)) <= 0.5 * box.new_w / sw + 1e-6


@pytest.mark.parametrize("size", [(0, 1), (1, 0), (0, 0), (-1, 5)])
def test_an_image_without_area_has_no_geometry(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="has no area"):
        letterbox_geometry(*size, 416, 416)


def reference(image: NDArray[np.uint8], model: Model) -> NDArray[np.float32]:
    """Letterbox and normalisation in the plainest form."""
    spec = model.input
    box = letterbox_geometry(image.shape[1], image.shape[0], spec.width, spec.height)
    canvas = np.full((spec.height, spec.width, 3), spec.pad_value, np.uint8)
    canvas[box.top : box.top + box.new_h, box.left : box.left + box.new_w] = cv2.resize(
        np.ascontiguousarray(image), (box.new_w, box.new_h)
    )
    mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)
    normal = (canvas.astype(np.float32) - mean) / std
    return np.ascontiguousarray(normal.transpose(2, 0, 1)[None])


def output(model: Model) -> NDArray[np.float32]:
    return np.full(model.input.tensor.shape, np.nan, np.float32)


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_one_size_after_another_leaves_nothing_behind(nanodet: Model) -> None:
    preprocessor = Preprocessor(nanodet)
    out = output(nanodet)
    sizes = [(540, 960), (960, 540), (1, 1), (416, 416), (1, 3000), (3000, 1), (540, 960), (2, 7)]
    for seed, (height, width) in enumerate(sizes):
        image = noise(height, width, seed)
        box = preprocessor.run(image, out)
        assert box == letterbox_geometry(width, height, 416, 416)
        np.testing.assert_array_equal(out, reference(image, nanodet))


def test_the_border_is_the_pad_value_in_every_channel(nanodet: Model) -> None:
    out = output(nanodet)
    Preprocessor(nanodet).run(np.zeros((100, 200, 3), np.uint8), out)
    grey = (114 - np.array([103.53, 116.28, 123.675])) / [57.375, 57.12, 58.395]
    black = -np.array([103.53, 116.28, 123.675]) / [57.375, 57.12, 58.395]
    for row, expected in ((0, grey), (103, grey), (104, black), (311, black), (312, grey)):
        for column in (0, 200, 415):
            np.testing.assert_allclose(out[0, :, row, column], expected, rtol=1e-6)


def test_channels_stay_blue_green_red(nanodet: Model) -> None:
    out = output(nanodet)
    image = np.zeros((10, 10, 3), np.uint8)
    image[...] = 10, 100, 200
    Preprocessor(nanodet).run(image, out)
    np.testing.assert_allclose(
        out[0, :, 200, 200],
        [(10 - 103.53) / 57.375, (100 - 116.28) / 57.12, (200 - 123.675) / 58.395],
        rtol=1e-6,
    )


def test_padded_rows_and_read_only_pixels_are_taken_as_they_are(nanodet: Model) -> None:
    memory = noise(60, 90)
    view = memory[5:55, 10:80]
    view.flags.writeable = False
    out = output(nanodet)
    Preprocessor(nanodet).run(view, out)
    np.testing.assert_array_equal(out, reference(view.copy(), nanodet))


@pytest.mark.parametrize("size", [(1080, 1920), (480, 640), (300, 200), (97, 101)])
def test_a_rectangle_is_found_where_the_geometry_puts_it(
    nanodet: Model, size: tuple[int, int]
) -> None:
    height, width = size
    left, top, right, bottom = width // 4, height // 3, width // 2, 2 * height // 3
    image = np.zeros((height, width, 3), np.uint8)
    image[top:bottom, left:right] = 255
    out = output(nanodet)
    box = Preprocessor(nanodet).run(image, out)
    bright = out[0, 0] > (127 - 103.53) / 57.375
    inside = bright[box.top : box.top + box.new_h, box.left : box.left + box.new_w]
    rows = np.flatnonzero(inside.any(axis=1)) + box.top
    columns = np.flatnonzero(inside.any(axis=0)) + box.left
    x0, y0 = box.to_input(left, top)
    x1, y1 = box.to_input(right, bottom)
    found = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    assert np.abs(found - [x0, y0, x1, y1]).max() <= 1.0
    back = np.array([*box.to_source(x0, y0), *box.to_source(x1, y1)])
    assert np.abs(back - [left, top, right, bottom]).max() < 0.5


@pytest.mark.parametrize(
    ("image", "part"),
    [
        (np.zeros((4, 4, 3), np.float32), "float32 [4, 4, 3]"),
        (np.zeros((4, 4, 4), np.uint8), "uint8 [4, 4, 4]"),
        (np.zeros((4, 4), np.uint8), "uint8 [4, 4]"),
        (np.zeros((4, 4, 1), np.uint8), "uint8 [4, 4, 1]"),
        (np.zeros((0, 4, 3), np.uint8), "4 x 0 pixels has no area"),
        (np.zeros((4, 0, 3), np.uint8), "0 x 4 pixels has no area"),
    ],
)
def test_an_image_that_is_none_is_refused_and_the_next_one_works(
    tiny: Model, image: NDArray[np.uint8], part: str
) -> None:
    preprocessor = Preprocessor(tiny)
    out = output(tiny)
    with pytest.raises(InputError) as caught:
        preprocessor.run(image, out)
    assert part in str(caught.value)
    good = noise(20, 30)
    preprocessor.run(good, out)
    np.testing.assert_array_equal(out, reference(good, tiny))


def test_nothing_is_allocated_after_the_first_frame_of_a_size(nanodet: Model) -> None:
    preprocessor = Preprocessor(nanodet)
    image = noise(720, 1280)
    out = output(nanodet)
    preprocessor.run(image, out)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(3):
            preprocessor.run(image, out)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # array headers come and go; one row of pixels (3840 bytes) would already show
    assert peak - before < 3000
    assert after - before < 1000


def test_opencv_is_kept_to_the_calling_thread(tiny: Model) -> None:
    cv2.setNumThreads(2)
    Preprocessor(tiny)
    assert cv2.getNumThreads() == 1
