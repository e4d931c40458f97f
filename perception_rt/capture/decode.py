"""sensor_msgs/Image and CompressedImage from CDR bytes, without message objects.

Layout: OMG DDSI-RTPS 2.5, 10.2 (encapsulation) and OMG DDS-XTypes 1.3, 7.4.1 (XCDR version 1),
little-endian. Neither message holds anything wider than 4 bytes, so every number is aligned to 4.

No function here raises for a bad frame: the reason goes to ``FrameBuffer.error``. Budget of the
Python around the pixel work: 0.1 ms a frame.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from perception_rt.core.clock import NS_PER_S
from perception_rt.core.errors import InputError
from perception_rt.core.frame import FrameBuffer

IMAGE_TYPE = "sensor_msgs/msg/Image"
COMPRESSED_IMAGE_TYPE = "sensor_msgs/msg/CompressedImage"

MAX_PIXELS = 1 << 26
"""Largest image taken: a damaged size field must not make the process allocate gigabytes."""

_MAX_JPEG_MARKERS = 256  # before the frame header; bounds the time that garbage can take
_CDR_LE = b"\x00\x01"
_STAMP = struct.Struct("<iI")
_U32 = struct.Struct("<I")
_PAIR = struct.Struct("<II")
_BE_U16 = struct.Struct(">H")
_BE_SIZE16 = struct.Struct(">HH")
_BE_SIZE32 = struct.Struct(">II")

# encoding: (bytes per pixel, conversion to BGR; None: it is BGR already)
_ENCODINGS: dict[str, tuple[int, int | None]] = {
    "bgr8": (3, None),
    "8UC3": (3, None),
    "rgb8": (3, cv2.COLOR_RGB2BGR),
    "mono8": (1, cv2.COLOR_GRAY2BGR),
    "8UC1": (1, cv2.COLOR_GRAY2BGR),
    "bgra8": (4, cv2.COLOR_BGRA2BGR),
    "rgba8": (4, cv2.COLOR_RGBA2BGR),
    "yuv422": (2, cv2.COLOR_YUV2BGR_UYVY),
    "uyvy": (2, cv2.COLOR_YUV2BGR_UYVY),
    "yuv422_yuy2": (2, cv2.COLOR_YUV2BGR_YUY2),
    "yuyv": (2, cv2.COLOR_YUV2BGR_YUY2),
}


def header_stamp_ns(raw: bytes) -> int:
    """The header stamp of a message, nanoseconds; 0 where the header cannot be read."""
    try:
        return _header(raw)[0]
    except InputError:
        return 0


def decode_image(raw: bytes, buffer: FrameBuffer) -> None:
    """Decode a sensor_msgs/Image into ``buffer``: image (BGR), header stamp and frame_id, error.

    Args:
        raw: the serialized message, encapsulation header included.
        buffer: filled; ``error`` says why where the frame cannot be used.
    """
    _decode(raw, buffer, _image)


def decode_compressed_image(raw: bytes, buffer: FrameBuffer) -> None:
    """Decode a sensor_msgs/CompressedImage (JPEG or PNG), as ``decode_image`` does.

    A JPEG goes into the buffer; of a PNG ``buffer.image`` is the decoder's own output, because
    cv2.imdecode takes no destination from Python.
    """
    _decode(raw, buffer, _compressed_image)


DECODERS: dict[str, Callable[[bytes, FrameBuffer], None]] = {
    IMAGE_TYPE: decode_image,
    COMPRESSED_IMAGE_TYPE: decode_compressed_image,
}
"""The decoder of each message type that a source can play."""


def _decode(
    raw: bytes, buffer: FrameBuffer, body: Callable[[bytes, int, FrameBuffer], None]
) -> None:
    buffer.error = ""
    buffer.header_stamp_ns = 0
    buffer.header_frame_id = ""
    try:
        buffer.header_stamp_ns, buffer.header_frame_id, pos = _header(raw)
        body(raw, pos, buffer)
    except InputError as error:
        buffer.error = str(error)
    except Exception as error:  # noqa: BLE001  (a decoder fails in any way there is)
        buffer.error = decoder_fault(error)


def decoder_fault(error: Exception) -> str:
    """What ``FrameBuffer.error`` says of an exception that a decoder raised; one line."""
    if isinstance(error, cv2.error):
        text = str(getattr(error, "err", "") or error)
    else:
        text = f"{type(error).__name__}: {error}"
    return f"image cannot be decoded: {' '.join(text.split()).rstrip(':')}"


def _header(raw: bytes) -> tuple[int, str, int]:
    """Stamp in nanoseconds, frame_id, and the position behind the header."""
    if len(raw) < 16:
        raise InputError(f"message of {len(raw)} bytes is too short for a header")
    if raw[:2] != _CDR_LE:
        kind = "big-endian CDR" if raw[:2] == b"\x00\x00" else f"encapsulation 0x{raw[:2].hex()}"
        raise InputError(f"message is {kind}; only little-endian CDR (0x0001) can be read")
    sec, nanosec = _STAMP.unpack_from(raw, 4)
    frame_id, pos = _string(raw, 12, "frame_id")
    return sec * NS_PER_S + nanosec, frame_id, pos


def _string(raw: bytes, pos: int, name: str) -> tuple[str, int]:
    start = ((pos + 3) & ~3) + 4
    if start > len(raw):
        raise InputError(f"message is cut off before {name}")
    end = start + _U32.unpack_from(raw, start - 4)[0]
    if end > len(raw):
        raise InputError(
            f"message is cut off: {name} should have {end - start} bytes, "
            f"{len(raw) - start} are there"
        )
    return raw[start:end].rstrip(b"\x00").decode("utf-8", "replace"), end


def _data(raw: bytes, pos: int) -> tuple[int, int]:
    """Position and size of the byte sequence whose length is at ``pos``, aligned."""
    start = ((pos + 3) & ~3) + 4
    if start > len(raw):
        raise InputError("message is cut off before data")
    size: int = _U32.unpack_from(raw, start - 4)[0]
    if size > len(raw) - start:
        raise InputError(
            f"message is cut off: data should have {size} bytes, {len(raw) - start} are there"
        )
    return start, size


def _check_size(width: int, height: int) -> None:
    if width == 0 or height == 0:
        raise InputError(f"image of {width} x {height} pixels is empty")
    if width * height > MAX_PIXELS:
        raise InputError(
            f"image of {width} x {height} pixels is larger than the {MAX_PIXELS} that are taken"
        )


def _image(raw: bytes, pos: int, buffer: FrameBuffer) -> None:
    pos = (pos + 3) & ~3
    if pos + 8 > len(raw):
        raise InputError("message is cut off before height and width")
    height, width = _PAIR.unpack_from(raw, pos)
    encoding, pos = _string(raw, pos + 8, "encoding")
    pos = (pos + 4) & ~3  # behind is_bigendian, which means nothing for 8-bit encodings
    if pos + 4 > len(raw):
        raise InputError("message is cut off before step")
    step: int = _U32.unpack_from(raw, pos)[0]
    start, size = _data(raw, pos + 4)

    known = _ENCODINGS.get(encoding)
    if known is None:
        raise InputError(
            f"encoding {encoding[:32]!a} is not supported; supported are {', '.join(_ENCODINGS)}"
        )
    channels, conversion = known
    _check_size(width, height)
    if step < width * channels:
        raise InputError(f"step {step} is less than width * bytes per pixel = {width * channels}")
    if height * step != size:
        raise InputError(f"height * step = {height * step} does not match the data size {size}")
    if channels == 2 and width % 2:
        raise InputError(f"width {width} is odd, which encoding '{encoding}' does not allow")

    shape, strides = (
        ((height, width), (step, 1))
        if channels == 1
        else ((height, width, channels), (step, channels, 1))
    )
    source: NDArray[np.uint8] = np.ndarray(shape, np.uint8, raw, start, strides)
    image = buffer.reserve(height, width)
    if conversion is None:
        np.copyto(image, source)
    else:
        cv2.cvtColor(source, conversion, image)


def _compressed_image(raw: bytes, pos: int, buffer: FrameBuffer) -> None:
    fmt, pos = _string(raw, pos, "format")
    start, size = _data(raw, pos)
    end = start + size
    if raw.startswith(b"\xff\xd8", start, end):
        _jpeg(raw, start, end, buffer)
        return
    if raw.startswith(b"\x89PNG\r\n\x1a\n", start, end):
        if size < 24:
            raise InputError(f"PNG of {size} bytes is truncated")
        _check_size(*_BE_SIZE32.unpack_from(raw, start + 16))
        if raw.rfind(b"IEND", start, end) < 0:
            raise InputError(f"PNG of {size} bytes is truncated: it has no end chunk")
    else:
        raise InputError(
            f"compressed data with format {fmt[:32]!a} ({size} bytes) is neither JPEG nor PNG"
        )
    encoded = np.frombuffer(raw, np.uint8, size, start)
    # The stubs leave out that imdecode returns None for what it cannot decode.
    image: NDArray[np.uint8] | None = cv2.imdecode(  # type: ignore[assignment]
        encoded, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    )
    if image is None:
        raise InputError(
            f"compressed image with format {fmt[:32]!a} ({size} bytes) cannot be decoded"
        )
    buffer.image = image


def _jpeg(raw: bytes, start: int, end: int, buffer: FrameBuffer) -> None:
    """Decode into the buffer. What libjpeg only warns of is refused: it fills what is missing or
    damaged with grey.
    """
    width, height = _jpeg_size(raw, start, end)
    _check_size(width, height)
    data = memoryview(raw)[start:end]
    image = buffer.reserve(height, width)
    try:
        simplejpeg.decode_jpeg(data, "BGR", buffer=image)
    except ValueError as error:
        raise InputError(f"JPEG of {end - start} bytes is damaged: {error}") from error


def _jpeg_size(raw: bytes, start: int, end: int) -> tuple[int, int]:
    """Width and height from the frame header (ITU-T T.81, B.2.2)."""
    pos = start + 2
    for _ in range(_MAX_JPEG_MARKERS):
        if pos + 9 > end or raw[pos] != 0xFF:
            break
        marker = raw[pos + 1]
        if marker == 0xFF:  # fill byte
            pos += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = _BE_SIZE16.unpack_from(raw, pos + 5)
            return width, height
        elif marker == 0xDA:
            break
        else:
            pos += 2 + _BE_U16.unpack_from(raw, pos + 2)[0]
    raise InputError(f"JPEG of {end - start} bytes has no frame header")
