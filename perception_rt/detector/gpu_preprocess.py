"""Preprocess on the GPU: what ``kernels/letterbox.cu`` is called, and what it is launched with.

The kernel does on the device what ``preprocess.Preprocessor`` does on the CPU: same geometry (the
same integers), grey levels within one, and it also takes RGB, grey and YUV images as cameras
deliver them. Everything here is plain data: this module imports neither pycuda nor a CUDA library.
``kernel_compiler`` makes the cubin when engines are built; ``tensorrt_backend`` loads and launches
it.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

from perception_rt.core.errors import InputError
from perception_rt.detector.model import InputSpec
from perception_rt.detector.preprocess import Letterbox, letterbox_geometry

SOURCE_NAME = "letterbox.cu"

MAX_SOURCE_SIDE = 32_768
"""Largest image side, pixels: with MAX_INPUT_SIDE it keeps the kernel's products in 32 bits."""

MAX_INPUT_SIDE = 16_384
"""Largest side of the input tensor, pixels."""

_BLOCK = (32, 8, 1)


class PixelFormat(IntEnum):
    """Layout of the source image; the numbers are those of ``Format`` in the kernel.

    YUYV, UYVY and NV12 are BT.601 with luma 16 to 235, as OpenCV converts them. An NV12 image is
    one block: ``height`` rows of Y, then ``height / 2`` rows of U, V pairs, all ``step`` bytes
    apart.
    """

    BGR8 = 0
    RGB8 = 1
    MONO8 = 2
    YUYV = 3
    UYVY = 4
    NV12 = 5


_BYTES_PER_PIXEL = {
    PixelFormat.BGR8: 3,
    PixelFormat.RGB8: 3,
    PixelFormat.MONO8: 1,
    PixelFormat.YUYV: 2,
    PixelFormat.UYVY: 2,
    PixelFormat.NV12: 1,  # of a row of Y
}
_EVEN_WIDTH = (PixelFormat.YUYV, PixelFormat.UYVY, PixelFormat.NV12)


class ImageLayout(NamedTuple):
    """How a source image lies in memory.

    Attributes:
        pixel_format: its pixels.
        width, height: pixels.
        step: bytes from one row to the next.
    """

    pixel_format: PixelFormat
    width: int
    height: int
    step: int

    @property
    def size_bytes(self) -> int:
        """Bytes from the first to behind the last row, padding of the last row included."""
        rows = self.height * 3 // 2 if self.pixel_format == PixelFormat.NV12 else self.height
        return rows * self.step


class KernelSpec(NamedTuple):
    """An entry point of the compiled kernel.

    Attributes:
        entry: its name in the module.
        arg_format: its arguments in the letters of ``struct`` (native sizes and alignment), as
            pycuda's ``Function.prepare`` takes them: source address, output address, integers,
            floats.
        block: threads per block, x, y, z.
    """

    entry: str
    arg_format: str
    block: tuple[int, int, int]


KERNELS = {
    dtype: KernelSpec(f"letterbox_{dtype}", "PP" + 11 * "i" + 6 * "f", _BLOCK)
    for dtype in ("float32", "float16")
}
"""The entry point by dtype of the network's input tensor."""


class Launch(NamedTuple):
    """One launch of the kernel.

    Attributes:
        grid: blocks, x, y, z.
        args: one value for each letter of ``KernelSpec.arg_format``.
        letterbox: how the image's pixels are mapped to the input tensor.
    """

    grid: tuple[int, int, int]
    args: tuple[int | float, ...]
    letterbox: Letterbox


def kernel_source() -> str:
    """The CUDA C++ text of the kernel."""
    folder = resources.files("perception_rt.detector").joinpath("kernels")
    return folder.joinpath(SOURCE_NAME).read_text(encoding="utf-8")


def kernel_sha256() -> str:
    """Hexadecimal digest of the kernel's text: part of the key under which its cubin is cached."""
    return hashlib.sha256(kernel_source().encode()).hexdigest()


@lru_cache(maxsize=64)
def launch(image: ImageLayout, spec: InputSpec, source: int, out: int) -> Launch:
    """What to launch the kernel with; remembered, so that a frame costs one look-up.

    Args:
        image: the source image.
        spec: the network's input. Its dtype is not looked at: it chooses the ``KernelSpec``.
        source: address of the image as the device sees it, readable for ``image.size_bytes``.
        out: device address of the input tensor, [1, 3, spec.height, spec.width], contiguous;
            every element is written.

    Raises:
        InputError: the image has no area, is too large, or its step or size does not fit its
            format.
    """
    _check(image)
    width, height = spec.width, spec.height
    if max(width, height) > MAX_INPUT_SIDE:
        raise InputError(
            f"input tensor of {width} x {height} pixels is larger than the {MAX_INPUT_SIDE} a "
            "side that the GPU preprocess takes: use the onnxruntime backend"
        )
    box = letterbox_geometry(image.width, image.height, width, height)
    block_x, block_y, _ = _BLOCK
    return Launch(
        grid=(-(-width // block_x), -(-height // block_y), 1),
        args=(
            source,
            out,
            int(image.pixel_format),
            image.width,
            image.height,
            image.step,
            width,
            height,
            box.new_w,
            box.new_h,
            box.left,
            box.top,
            spec.pad_value,
            *spec.mean,
            *spec.std,
        ),
        letterbox=box,
    )


def _check(image: ImageLayout) -> None:
    pixel_format, width, height, step = image
    name = f"{pixel_format.name} image of {width} x {height} pixels"
    if min(width, height) < 1:
        raise InputError(f"{name} has no area: check the source")
    if max(width, height) > MAX_SOURCE_SIDE:
        raise InputError(
            f"{name} is larger than the {MAX_SOURCE_SIDE} a side that the GPU preprocess takes: "
            "check the source, or use the onnxruntime backend"
        )
    row = width * _BYTES_PER_PIXEL[pixel_format]
    if not row <= step < 1 << 31:
        raise InputError(f"{name} has step {step}, its rows have {row} bytes: check the source")
    if pixel_format in _EVEN_WIDTH and width % 2:
        raise InputError(f"{name} has an odd width, which its format does not allow")
    if pixel_format == PixelFormat.NV12 and height % 2:
        raise InputError(f"{name} has an odd height, which its format does not allow")
