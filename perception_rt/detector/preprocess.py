"""Image to input tensor: letterbox (centred, aspect kept) and normalisation.

Coordinates are continuous: pixel column i covers [i, i + 1), an image spans [0, width]. That is
the convention of ``cv2.resize`` (which maps pixel centres) and of boxes given by their edges.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from perception_rt.core.errors import InputError
from perception_rt.detector.model import Model


class Letterbox(NamedTuple):
    """How a source image lies in the input tensor. Forward and inverse use the same integers.

    Attributes:
        src_w, src_h: size of the source image, pixels.
        dst_w, dst_h: size of the input tensor, pixels.
        new_w, new_h: size of the scaled image inside it.
        left, top: offset of the scaled image inside it.
    """

    src_w: int
    src_h: int
    dst_w: int
    dst_h: int
    new_w: int
    new_h: int
    left: int
    top: int

    def to_input(self, x: float, y: float) -> tuple[float, float]:
        """A point of the source image, in input pixels."""
        return self.left + x * self.new_w / self.src_w, self.top + y * self.new_h / self.src_h

    def to_source(self, x: float, y: float) -> tuple[float, float]:
        """A point of the input tensor, in source pixels; outside the image if in the border."""
        return (x - self.left) * self.src_w / self.new_w, (y - self.top) * self.src_h / self.new_h


@lru_cache(maxsize=64)
def letterbox_geometry(src_w: int, src_h: int, dst_w: int, dst_h: int) -> Letterbox:
    """The largest scaled copy that fits, centred; sides rounded half up, never below 1 pixel.

    Raises:
        InputError: a side is below 1.
    """
    if min(src_w, src_h, dst_w, dst_h) < 1:
        raise InputError(f"image of {src_w} x {src_h} pixels has no area: check the source")
    if src_w * dst_h >= src_h * dst_w:
        new_w = dst_w
        new_h = max(1, (2 * src_h * dst_w + src_w) // (2 * src_w))
    else:
        new_h = dst_h
        new_w = max(1, (2 * src_w * dst_h + src_h) // (2 * src_h))
    return Letterbox(
        src_w, src_h, dst_w, dst_h, new_w, new_h, (dst_w - new_w) // 2, (dst_h - new_h) // 2
    )


class Preprocessor:
    """Fills the input tensor of a model from images; allocates only when the image size changes.

    Median on a 2-core VM, 1920 x 1080 to 416 x 416: resize 0.37 ms, normalisation 0.22 ms. All of
    it is cv2 and numpy calls that release the GIL. Normalising by planes (``cv2.split`` first) is
    twice as fast as through a transposed view, and faster than look-up tables. Not for use from
    two threads.

    Sets OpenCV to one thread: its pool has neither the priority nor the core of the caller.
    """

    def __init__(self, model: Model) -> None:
        spec = model.input
        self._height = spec.height
        self._width = spec.width
        self._pad_value = spec.pad_value
        self._mean = [np.float32(v) for v in spec.mean]
        self._std = [np.float32(v) for v in spec.std]
        self._canvas = np.zeros((spec.height, spec.width, 3), np.uint8)
        self._planes = [np.zeros((spec.height, spec.width), np.uint8) for _ in range(3)]
        self._inner: NDArray[np.uint8] = self._canvas
        self._letterbox: Letterbox | None = None
        cv2.setNumThreads(1)

    def run(self, image: NDArray[np.uint8], out: NDArray[np.float32]) -> Letterbox:
        """Letterbox ``image`` and write ``(pixel - mean) / std`` to ``out``.

        Args:
            image: uint8 [height, width, 3], BGR; rows may be padded (a larger row stride).
            out: float32 [1, 3, input height, input width], contiguous; overwritten.

        Raises:
            InputError: ``image`` has another dtype or form, or no area.
        """
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            found = f"{image.dtype} {list(image.shape)}"
            raise InputError(
                f"image is {found}, expected uint8 [height, width, 3]: check the source"
            )
        height, width, _ = image.shape
        box = self._letterbox
        if box is None or box.src_w != width or box.src_h != height:
            box = self._set_geometry(width, height)
        cv2.resize(image, (box.new_w, box.new_h), dst=self._inner, interpolation=cv2.INTER_LINEAR)
        cv2.split(self._canvas, self._planes)
        for channel in range(3):
            plane = out[0, channel]
            # Cast first: a ufunc that casts on the way takes a buffer of 64 KiB each time.
            np.copyto(plane, self._planes[channel])
            np.subtract(plane, self._mean[channel], out=plane)
            np.divide(plane, self._std[channel], out=plane)
        return box

    def _set_geometry(self, width: int, height: int) -> Letterbox:
        box = letterbox_geometry(width, height, self._width, self._height)
        self._canvas.fill(self._pad_value)
        self._inner = self._canvas[box.top : box.top + box.new_h, box.left : box.left + box.new_w]
        self._letterbox = box
        return box
