"""What needs the driver alone: the preprocess kernel, and the kernel that stands for a segment."""

from __future__ import annotations

import ctypes
import statistics
import time
from itertools import pairwise
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from support import spin_trt
from support.gpu_driver import pack

from perception_rt.core.errors import BackendError
from perception_rt.detector import gpu_preprocess
from perception_rt.detector.gpu_preprocess import KERNELS, ImageLayout, PixelFormat
from perception_rt.detector.kernel_compiler import compile_cubin
from perception_rt.detector.model import load_model
from perception_rt.detector.preprocess import Preprocessor

SIZES = [(1920, 1080), (640, 480), (416, 416), (200, 700), (1282, 718), (32, 16)]
TO_BGR = {
    PixelFormat.NV12: cv2.COLOR_YUV2BGR_NV12,
    PixelFormat.YUYV: cv2.COLOR_YUV2BGR_YUY2,
    PixelFormat.UYVY: cv2.COLOR_YUV2BGR_UYVY,
    PixelFormat.RGB8: cv2.COLOR_RGB2BGR,
    PixelFormat.MONO8: cv2.COLOR_GRAY2BGR,
}


@pytest.fixture(scope="module")
def detector(repository):
    return load_model(repository / "models" / "nanodet_g_416_coco80")


@pytest.fixture(scope="module")
def letterbox_cubin(gpu):
    return compile_cubin(
        gpu_preprocess.kernel_source(), "letterbox.cu", gpu.sm, gpu.cuda_major
    ).data


@pytest.fixture
def letterbox(in_context, letterbox_cubin, detector):
    """Runs the kernel on an image, as its format lies in memory, and gives the input tensor."""
    module = in_context.load(letterbox_cubin)
    spec = KERNELS["float32"]
    function = in_context.function(module, spec.entry)
    out = np.zeros(detector.input.tensor.shape, np.float32)
    target = in_context.allocate(out.nbytes)
    sources = []

    def run(pixel_format, width, height, data):
        source = in_context.allocate(data.nbytes)
        sources.append(source)
        in_context.upload(source, data)
        in_context.fill(target, out.nbytes, 0xFF)  # NaN: an element that is not written shows
        layout = ImageLayout(pixel_format, width, height, data.strides[0])
        launch = gpu_preprocess.launch(layout, detector.input, source, target)
        values = [_c_type(letter)(v) for letter, v in zip(spec.arg_format, launch.args)]
        parameters = pack(*values)

        def go(times):
            for _ in range(times):
                in_context.launch(function, launch.grid, spec.block, parameters)
            in_context.call("cuCtxSynchronize")

        go(1)
        in_context.download(out, target)
        return SimpleNamespace(tensor=out, go=go)

    yield run
    for address in (target, *sources):
        in_context.free(address)
    in_context.unload(module)


def _c_type(letter):
    return {"P": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}[letter]


def _picture(pixel_format, width, height):
    """Noise over a gradient, as the format lies in memory."""
    rows, depth = height, {PixelFormat.YUYV: 2, PixelFormat.UYVY: 2}.get(pixel_format, 3)
    if pixel_format == PixelFormat.NV12:
        rows, depth = height * 3 // 2, 1
    if pixel_format == PixelFormat.MONO8:
        depth = 1
    generator = np.random.default_rng(width * 10_007 + height)
    ramp = np.linspace(0, 200, width * depth)
    return (ramp + generator.integers(0, 56, (rows, width * depth))).astype(np.uint8)


def _as_bgr(pixel_format, width, height, data):
    if pixel_format == PixelFormat.BGR8:
        return data.reshape(height, width, 3)
    if pixel_format in (PixelFormat.YUYV, PixelFormat.UYVY):
        return cv2.cvtColor(data.reshape(height, width, 2), TO_BGR[pixel_format])
    if pixel_format == PixelFormat.RGB8:
        return cv2.cvtColor(data.reshape(height, width, 3), TO_BGR[pixel_format])
    return cv2.cvtColor(data, TO_BGR[pixel_format])


@pytest.mark.parametrize("pixel_format", list(PixelFormat), ids=lambda f: f.name)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_preprocess_is_that_of_the_cpu_within_one_grey_level(
    letterbox, detector, pixel_format, size
):
    width, height = size
    data = _picture(pixel_format, width, height)
    result = letterbox(pixel_format, width, height, data)
    expected = np.zeros(detector.input.tensor.shape, np.float32)
    Preprocessor(detector).run(_as_bgr(pixel_format, width, height, data), expected)
    assert np.isfinite(result.tensor).all()
    grey_levels = np.abs(result.tensor - expected) * np.array(detector.input.std).reshape(
        1, 3, 1, 1
    )
    assert grey_levels.max() <= 1.01


def test_preprocess_honours_padded_rows(letterbox):
    padded = np.full((480, 640 * 3 + 64), 255, np.uint8)
    padded[:, : 640 * 3] = _picture(PixelFormat.BGR8, 640, 480)
    tensor = letterbox(PixelFormat.BGR8, 640, 480, padded).tensor.copy()
    plain = letterbox(PixelFormat.BGR8, 640, 480, np.ascontiguousarray(padded[:, : 640 * 3]))
    np.testing.assert_array_equal(tensor, plain.tensor)


def test_preprocess_duration(letterbox, figure):
    result = letterbox(PixelFormat.BGR8, 1920, 1080, _picture(PixelFormat.BGR8, 1920, 1080))
    result.go(50)
    runs = []
    for _ in range(20):
        began = time.perf_counter()
        result.go(50)
        runs.append((time.perf_counter() - began) / 50 * 1e6)
    figure("letterbox of 1920 x 1080 BGR8, median, us", statistics.median(runs))


def test_a_kernel_that_does_not_compile_says_why(gpu):
    with pytest.raises(BackendError, match=r"no_such_name"):
        compile_cubin("__global__ void f() { no_such_name(); }", "bad.cu", gpu.sm)


@pytest.mark.parametrize("asked_us", [200, 2000, 20000])
def test_a_spin_takes_the_time_it_is_asked_for(in_context, model, asked_us):
    """Else the durations of the other parts mean nothing."""
    engine = spin_trt.Runtime(spin_trt.Logger()).deserialize_cuda_engine(
        spin_trt.plan(model, 2, asked_us * 1000)
    )
    assert engine is not None
    context = engine.create_execution_context()
    addresses = [
        in_context.allocate(4 * int(np.prod(engine.get_tensor_shape(name))))
        for name in (engine.get_tensor_name(i) for i in range(engine.num_io_tensors))
    ]
    for i, address in enumerate(addresses):
        assert context.set_tensor_address(engine.get_tensor_name(i), address)
    stream = ctypes.c_void_p()
    in_context.call("cuStreamCreate", ctypes.byref(stream), 1)
    instants = [time.perf_counter()]
    for _ in range(30):
        assert context.execute_async_v3(stream.value or 0)
        in_context.call("cuStreamSynchronize", stream)
        instants.append(time.perf_counter())
    taken_us = statistics.median((b - a) * 1e6 for a, b in pairwise(instants))
    in_context.call("cuStreamDestroy_v2", stream)
    for address in addresses:
        in_context.free(address)
    assert asked_us <= taken_us <= 1.02 * asked_us + 150
