"""The kernel, compiled for the host, against the CPU's preprocess; what it is launched with."""

from __future__ import annotations

import re
import struct
from dataclasses import replace

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.host_kernel import HostKernel

from perception_rt.core.errors import InputError
from perception_rt.detector.gpu_preprocess import (
    KERNELS,
    ImageLayout,
    Launch,
    PixelFormat,
    kernel_sha256,
    kernel_source,
    launch,
)
from perception_rt.detector.model import InputSpec, TensorSpec
from perception_rt.detector.preprocess import Letterbox, Preprocessor, letterbox_geometry

BGR8, RGB8, MONO8, YUYV, UYVY, NV12 = PixelFormat
TO_BGR = {
    RGB8: cv2.COLOR_RGB2BGR,
    MONO8: cv2.COLOR_GRAY2BGR,
    YUYV: cv2.COLOR_YUV2BGR_YUY2,
    UYVY: cv2.COLOR_YUV2BGR_UYVY,
    NV12: cv2.COLOR_YUV2BGR_NV12,
}
CHANNELS = {BGR8: 3, RGB8: 3, MONO8: 1, YUYV: 2, UYVY: 2, NV12: 1}
SIDE = st.one_of(st.integers(1, 5), st.integers(1, 700))
INPUT_SIZE = st.sampled_from([(32, 32), (1, 1), (320, 192), (7, 97), (416, 416)])
PASS_THROUGH = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "pad_value": 114}
NANODET = {
    "mean": (103.53, 116.28, 123.675),
    "std": (57.375, 57.12, 58.395),
    "pad_value": 114,
}


@pytest.fixture(scope="session")
def host(tmp_path_factory) -> HostKernel:
    return HostKernel(tmp_path_factory.mktemp("kernel"))


def input_spec(width, height, mean, std, pad_value) -> InputSpec:
    return InputSpec(TensorSpec("image", (1, 3, height, width), "float32"), mean, std, pad_value)


def random_image(pixel_format, width, height, padding, seed, extreme=False):
    """uint8 [rows, step] as a camera delivers it, and its layout."""
    rng = np.random.default_rng(seed)
    rows = height * 3 // 2 if pixel_format == NV12 else height
    step = width * CHANNELS[pixel_format] + padding
    data = rng.integers(0, 256, (rows, step), np.uint8)
    if extreme:
        data = np.where(data < 128, np.uint8(0), np.uint8(255))
    return data, ImageLayout(pixel_format, width, height, step)


def as_bgr(data, layout):
    """The same image as OpenCV converts it, uint8 [height, width, 3]."""
    channels = CHANNELS[layout.pixel_format]
    pixels = np.ascontiguousarray(data[:, : layout.width * channels])
    pixels = pixels.reshape(len(data), layout.width, channels)
    if layout.pixel_format == BGR8:
        return pixels
    return cv2.cvtColor(pixels, TO_BGR[layout.pixel_format])


def run_kernel(host, data, layout, spec, dtype="float32"):
    """The kernel's output; nothing in front of it or behind it may change."""
    shape = spec.tensor.shape
    size = int(np.prod(shape))
    memory = np.full(size + 128, np.nan, dtype)
    out = memory[64 : 64 + size].reshape(shape)
    started = launch(layout, spec, data.ctypes.data, out.ctypes.data)
    host.run(dtype, started)
    assert np.isnan(memory[:64]).all()
    assert np.isnan(memory[64 + size :]).all()
    assert not np.isnan(out).any()
    return out, started.letterbox


def on_cpu(tiny, data, layout, spec):
    out = np.full(spec.tensor.shape, np.nan, np.float32)
    box = Preprocessor(replace(tiny, input=spec)).run(as_bgr(data, layout), out)
    return out, box


@settings(max_examples=150)
@given(
    st.sampled_from(PixelFormat), SIDE, SIDE, INPUT_SIZE, st.integers(0, 9), st.integers(0, 99),
    st.booleans(),
)  # fmt: skip
@example(BGR8, 1920, 1080, (416, 416), 0, 0, False)
@example(NV12, 1920, 1080, (416, 416), 128, 1, False)
@example(YUYV, 1280, 720, (416, 416), 0, 2, True)
@example(BGR8, 64, 64, (32, 32), 0, 3, True)  # exactly half: OpenCV averages areas
@example(BGR8, 32_768, 1, (16_384, 1), 0, 4, True)  # the largest sides: -ftrapv ends the process
@example(BGR8, 1, 32_768, (1, 16_384), 0, 5, True)
@example(MONO8, 1, 1, (16_384, 2), 0, 6, False)
def test_grey_levels_are_within_one_of_the_cpu_and_geometry_is_the_same(
    host, tiny, pixel_format, width, height, size, padding, seed, extreme
):
    if pixel_format in (YUYV, UYVY, NV12):
        width += width % 2
    if pixel_format == NV12:
        height += height % 2
    data, layout = random_image(pixel_format, width, height, padding, seed, extreme)

    spec = input_spec(*size, **PASS_THROUGH)  # output values are grey levels
    found, box = run_kernel(host, data, layout, spec)
    expected, cpu_box = on_cpu(tiny, data, layout, spec)
    assert box == cpu_box == letterbox_geometry(width, height, *size)
    assert np.array_equal(found, np.rint(found))
    assert np.abs(found - expected).max() <= 1

    spec = input_spec(*size, **NANODET)
    normalised, _ = run_kernel(host, data, layout, spec)
    cpu_normalised, _ = on_cpu(tiny, data, layout, spec)
    same = found == expected
    np.testing.assert_array_equal(normalised[same], cpu_normalised[same])


@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_colours_without_scaling_are_the_bytes_of_opencv(host, tiny, pixel_format):
    data, layout = random_image(pixel_format, 512, 384, 6, seed=7)
    spec = input_spec(512, 384, **NANODET)
    found, _ = run_kernel(host, data, layout, spec)
    expected, _ = on_cpu(tiny, data, layout, spec)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("y", "u", "v", "bgr"),
    [
        (16, 128, 128, (0, 0, 0)),
        (235, 128, 128, (255, 255, 255)),
        (0, 128, 128, (0, 0, 0)),
        (255, 128, 128, (255, 255, 255)),
        (126, 128, 128, (128, 128, 128)),  # 1.164 * 110 = 128.04
        # the colour bars of BT.601
        (81, 90, 240, (0, 0, 254)),
        (145, 54, 34, (1, 255, 0)),
        (41, 240, 110, (255, 0, 0)),
    ],
)
@pytest.mark.parametrize("pixel_format", [YUYV, UYVY, NV12])
def test_known_colours(host, pixel_format, y, u, v, bgr):
    rows = {
        YUYV: [[y, u, y, v]] * 2,
        UYVY: [[u, y, v, y]] * 2,
        NV12: [[y, y], [y, y], [u, v]],
    }[pixel_format]
    data = np.array(rows, np.uint8)
    layout = ImageLayout(pixel_format, 2, 2, data.shape[1])
    out, _ = run_kernel(host, data, layout, input_spec(2, 2, **PASS_THROUGH))
    assert out[0].reshape(3, 4).T.tolist() == [list(map(float, bgr))] * 4


def test_known_pixels_between_two(host):
    """Centres at 1/4 and 3/4 between the two columns; beyond the outer centres, the outer one."""
    data = np.array([[0, 200]], np.uint8)
    layout = ImageLayout(MONO8, 2, 1, 2)
    out, box = run_kernel(host, data, layout, input_spec(4, 4, **PASS_THROUGH))
    assert box == Letterbox(2, 1, 4, 4, 4, 2, 0, 1)
    border, inside = [114.0] * 4, [0.0, 50.0, 150.0, 200.0]
    assert out[0].tolist() == [[border, inside, inside, border]] * 3


def test_halves_round_up(host):
    data = np.array([[0, 1], [0, 1]], np.uint8)
    out, _ = run_kernel(host, data, ImageLayout(MONO8, 2, 2, 2), input_spec(1, 1, **PASS_THROUGH))
    assert out.ravel().tolist() == [1.0, 1.0, 1.0]


def test_weights_are_rounded_to_2048ths(host):
    """Exact: 7 times 3/14, 7/14, 11/14 = 1.5, 3.5, 5.5; 11/14 is 1609.14 / 2048, so 5.4995."""
    data = np.array([[0, 7]], np.uint8)
    out, _ = run_kernel(host, data, ImageLayout(MONO8, 2, 1, 2), input_spec(7, 4, **PASS_THROUGH))
    assert out[0, 0].tolist() == [[0.0, 0.0, 2.0, 4.0, 5.0, 7.0, 7.0]] * 4


@pytest.mark.parametrize("pixel_format", PixelFormat)
def test_nothing_beside_the_pixels_is_looked_at(host, pixel_format):
    """The image in the middle of memory that is all 0, then all 255: the answer is the same."""
    data, layout = random_image(pixel_format, 38, 22, 0, seed=3)
    spec = input_spec(32, 32, **NANODET)
    answers = []
    for poison in (0, 255):
        memory = np.full((len(data) + 8, layout.step + 16), poison, np.uint8)
        inside = memory[4:-4, 8:-8]
        if pixel_format == NV12:
            # One block: what lies between its rows is padding, what lies around it is poison.
            memory = np.full((len(data) + 8, layout.step), poison, np.uint8)
            inside = memory[4:-4]
        inside[...] = data
        answers.append(run_kernel(host, inside, layout._replace(step=memory.shape[1]), spec)[0])
    np.testing.assert_array_equal(*answers)
    np.testing.assert_array_equal(answers[0], run_kernel(host, data, layout, spec)[0])


@pytest.mark.parametrize("std", [57.375, 0.002, 3e8])
def test_float16_is_float32_rounded(host, std):
    """Also where halves overflow to infinity, are subnormal, or are 0."""
    data, layout = random_image(BGR8, 64, 48, 0, seed=5)
    spec = input_spec(96, 96, (103.53, 0.0, 128.0), (std, std, std), 114)
    full, _ = run_kernel(host, data, layout, spec)
    half, _ = run_kernel(host, data, layout, spec, "float16")
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half, full.astype(np.float16))


def test_a_launch_is_plain_data():
    spec = input_spec(416, 416, **NANODET)
    layout = ImageLayout(NV12, 1920, 1080, 2048)
    found = launch(layout, spec, 0x1000, 0x2000)
    assert found == Launch(
        (13, 52, 1),
        (
            0x1000, 0x2000, 5, 1920, 1080, 2048, 416, 416, 416, 234, 0, 91, 114,
            103.53, 116.28, 123.675, 57.375, 57.12, 58.395,
        ),
        Letterbox(1920, 1080, 416, 416, 416, 234, 0, 91),
    )  # fmt: skip
    assert launch(layout, spec, 0x1000, 0x2000) is found
    assert launch(layout, spec, 0x1000, 0x3000).args[:2] == (0x1000, 0x3000)
    assert layout.size_bytes == 2048 * 1620
    assert ImageLayout(BGR8, 100, 10, 320).size_bytes == 3200
    for kernel in KERNELS.values():
        assert len(struct.pack(kernel.arg_format, *found.args)) == 2 * 8 + 11 * 4 + 6 * 4


def test_the_grid_covers_the_input_and_no_block_is_all_outside():
    for width, height in ((1, 1), (32, 8), (33, 9), (416, 416), (31, 7)):
        grid = launch(ImageLayout(BGR8, 8, 8, 24), input_spec(width, height, **NANODET), 1, 2).grid
        assert grid == ((width + 31) // 32, (height + 7) // 8, 1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_arguments_are_those_of_the_entry_point(dtype):
    spec = KERNELS[dtype]
    found = re.findall(rf'extern "C" __global__ void {spec.entry}\(([^)]*)\)', kernel_source())
    (arguments,) = found
    letters = ""
    for argument in arguments.split(","):
        kind = argument.split()[0]
        letters += "P" if "*" in argument else {"int": "i", "float": "f"}[kind]
    assert spec.arg_format == letters
    value = {"float32": "float", "float16": "unsigned short"}[dtype]
    assert f"{value} *__restrict__ out" in arguments


def test_formats_are_numbered_as_in_the_kernel():
    (names,) = re.findall(r"enum Format \{([^}]*)\}", kernel_source())
    assert [name.strip() for name in names.split(",")] == [f.name for f in PixelFormat]
    assert list(PixelFormat) == list(range(6))


def test_the_digest_names_the_text():
    assert re.fullmatch("[0-9a-f]{64}", kernel_sha256())
    assert "#include" not in kernel_source()


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        (ImageLayout(BGR8, 0, 4, 12), "BGR8 image of 0 x 4 pixels has no area"),
        (ImageLayout(BGR8, 4, -1, 12), "has no area"),
        (ImageLayout(BGR8, 4, 4, 11), "step 11, its rows have 12 bytes"),
        (ImageLayout(BGR8, 4, 4, 1 << 31), "step 2147483648"),
        (ImageLayout(YUYV, 4, 4, 7), "step 7, its rows have 8 bytes"),
        (ImageLayout(YUYV, 5, 4, 10), "odd width"),
        (ImageLayout(UYVY, 5, 4, 10), "odd width"),
        (ImageLayout(NV12, 5, 4, 5), "odd width"),
        (ImageLayout(NV12, 4, 5, 4), "odd height"),
        (ImageLayout(MONO8, 32_769, 1, 32_769), "larger than the 32768 a side"),
        (ImageLayout(MONO8, 1, 32_769, 1), "larger than the 32768 a side"),
    ],
)
def test_an_image_that_the_kernel_cannot_take_is_refused(layout, part):
    with pytest.raises(InputError) as caught:
        launch(layout, input_spec(32, 32, **NANODET), 1, 2)
    assert part in str(caught.value)


def test_an_input_that_the_kernel_cannot_take_is_refused():
    with pytest.raises(InputError, match="16385 x 4 pixels is larger than the 16384"):
        launch(ImageLayout(BGR8, 4, 4, 12), input_spec(16_385, 4, **NANODET), 1, 2)
