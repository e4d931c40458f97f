"""Decoding of image messages: layouts, encodings, damaged and random input."""

from __future__ import annotations

import struct

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.capture.decode import (
    MAX_PIXELS,
    decode_compressed_image,
    decode_image,
    header_stamp_ns,
)
from perception_rt.core.frame import FrameBuffer


def decoded(raw: bytes, decode=decode_image) -> FrameBuffer:
    buffer = FrameBuffer()
    buffer.error = "left over"
    decode(raw, buffer)
    return buffer


def test_header_is_passed_on_unchanged(image_cdr):
    for frame_id in ("", "a", "ab", "abc", "camera_link", "kamera_größe"):
        raw = image_cdr(np.zeros((1, 3), np.uint8), 1, stamp_ns=-1, frame_id=frame_id)
        buffer = decoded(raw)
        assert (buffer.error, buffer.header_stamp_ns, buffer.header_frame_id) == ("", -1, frame_id)
        assert header_stamp_ns(raw) == -1


def test_bgr8_with_padded_rows(image_cdr):
    rows = np.arange(2 * 16, dtype=np.uint8).reshape(2, 16)  # 4 pixels and 4 bytes of padding
    buffer = decoded(image_cdr(rows, 4))
    assert buffer.error == ""
    assert buffer.image[0].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert buffer.image[1].tolist() == [[16, 17, 18], [19, 20, 21], [22, 23, 24], [25, 26, 27]]


@pytest.mark.parametrize(
    ("encoding", "pixels", "expected"),
    [
        ("bgr8", [1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]]),
        ("8UC3", [1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]]),
        ("rgb8", [1, 2, 3, 4, 5, 6], [[3, 2, 1], [6, 5, 4]]),
        ("bgra8", [1, 2, 3, 9, 4, 5, 6, 9], [[1, 2, 3], [4, 5, 6]]),
        ("rgba8", [1, 2, 3, 9, 4, 5, 6, 9], [[3, 2, 1], [6, 5, 4]]),
        ("mono8", [7, 200], [[7, 7, 7], [200, 200, 200]]),
        ("8UC1", [7, 200], [[7, 7, 7], [200, 200, 200]]),
        # Chroma 128 is grey, luma 16 black and 235 white (BT.601, limited range).
        ("yuv422", [128, 16, 128, 235], [[0, 0, 0], [255, 255, 255]]),
        ("uyvy", [128, 16, 128, 235], [[0, 0, 0], [255, 255, 255]]),
        ("yuv422_yuy2", [16, 128, 235, 128], [[0, 0, 0], [255, 255, 255]]),
        ("yuyv", [16, 128, 235, 128], [[0, 0, 0], [255, 255, 255]]),
    ],
)
def test_encodings_with_and_without_padding(image_cdr, encoding, pixels, expected):
    for padding in ([], [99, 98, 97]):
        rows = np.array([pixels + padding, pixels + padding], np.uint8)
        buffer = decoded(image_cdr(rows, 2, encoding))
        assert buffer.error == ""
        assert buffer.image.tolist() == [expected, expected]


def test_storage_is_reused_for_frames_of_the_same_size(image_cdr):
    buffer = FrameBuffer()
    decode_image(image_cdr(np.full((2, 12), 1, np.uint8), 4), buffer)
    image, storage = buffer.image, buffer.storage
    for encoding, channels in (("bgr8", 3), ("rgb8", 3), ("mono8", 1)):
        decode_image(image_cdr(np.full((2, 4 * channels), 5, np.uint8), 4, encoding), buffer)
        assert buffer.image is image
        assert buffer.storage is storage
        assert image.tolist() == [[[5] * 3] * 4] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": 13}, "height * step = 26 does not match the data size 24"),
        ({"height": 3}, "height * step = 36 does not match the data size 24"),
        ({"height": 0}, "image of 4 x 0 pixels is empty"),
        ({"step": 11}, "step 11 is less than width * bytes per pixel = 12"),
        ({"encoding": "bayer_rggb8"}, "encoding 'bayer_rggb8' is not supported"),
        ({"height": 1 << 30}, f"is larger than the {MAX_PIXELS}"),
    ],
)
def test_contradictions_are_named(image_cdr, change, reason):
    buffer = decoded(image_cdr(np.zeros((2, 12), np.uint8), 4, **change))
    assert reason in buffer.error
    assert buffer.header_frame_id == "cam"
    assert buffer.header_stamp_ns == 1_500_000_000


def test_odd_width_of_a_shared_chroma_encoding_is_refused(image_cdr):
    buffer = decoded(image_cdr(np.zeros((2, 6), np.uint8), 3, "uyvy"))
    assert buffer.error == "width 3 is odd, which encoding 'uyvy' does not allow"


def test_other_byte_orders_and_encapsulations_are_refused(image_cdr):
    raw = image_cdr(np.zeros((2, 12), np.uint8), 4)
    assert "message is big-endian CDR" in decoded(b"\x00\x00" + raw[2:]).error
    assert "message is encapsulation 0x0007" in decoded(b"\x00\x07" + raw[2:]).error
    assert header_stamp_ns(b"\x00\x00" + raw[2:]) == 0


def test_a_message_cut_anywhere_is_an_error(image_cdr, compressed_cdr):
    jpeg = cv2.imencode(".jpg", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    for raw, decode in (
        (image_cdr(np.zeros((2, 12), np.uint8), 4), decode_image),
        (compressed_cdr(jpeg), decode_compressed_image),
    ):
        assert decoded(raw, decode).error == ""
        assert all(decoded(raw[:cut], decode).error for cut in range(len(raw)))


def test_bytes_behind_the_data_do_not_matter(image_cdr):
    assert decoded(image_cdr(np.zeros((2, 12), np.uint8), 4) + b"\x00\x00\x00").error == ""


def picture() -> np.ndarray:
    y, x = np.mgrid[0:48, 0:64]
    return np.stack([x * 4, y * 5, (x + y) * 2], axis=2).astype(np.uint8)


@pytest.mark.parametrize(("suffix", "fmt"), [(".jpg", "jpeg"), (".png", "bgr8; png compressed")])
def test_jpeg_and_png(compressed_cdr, suffix, fmt):
    image = picture()
    raw = compressed_cdr(cv2.imencode(suffix, image)[1].tobytes(), fmt, frame_id="front")
    buffer = decoded(raw, decode_compressed_image)
    assert (buffer.error, buffer.header_frame_id) == ("", "front")
    assert buffer.image.shape == (48, 64, 3)
    assert np.abs(buffer.image.astype(int) - image).max() <= (40 if suffix == ".jpg" else 0)


def test_grey_jpeg_becomes_bgr(compressed_cdr):
    data = cv2.imencode(".jpg", np.full((16, 16), 90, np.uint8))[1].tobytes()
    buffer = decoded(compressed_cdr(data), decode_compressed_image)
    assert buffer.image[3, 3].tolist() == [90, 90, 90]


def test_a_damaged_jpeg_is_refused_not_shown_in_part(compressed_cdr):
    data = cv2.imencode(".jpg", picture())[1].tobytes()
    # What follows the end marker does not matter, nor what stands between it and the last scan:
    # some cameras pad.
    for padded in (data + bytes(64), data[:-2] + b"\x12\x34" + data[-2:]):
        assert decoded(compressed_cdr(padded), decode_compressed_image).error == ""
    buffer = decoded(compressed_cdr(data[:-2] + bytes(8)), decode_compressed_image)
    assert buffer.error == f"JPEG of {len(data) + 6} bytes is damaged: Premature end of JPEG file"
    scan = data.index(b"\xff\xda")
    for cut in range(scan + 20, len(data) - 2, 50):
        buffer = decoded(compressed_cdr(data[:cut] + b"\xff\xd9"), decode_compressed_image)
        assert buffer.error == (
            f"JPEG of {cut + 2} bytes is damaged: Corrupt JPEG data: premature end of data segment"
        )


def test_end_marker_of_a_thumbnail_is_not_the_end(compressed_cdr):
    data = cv2.imencode(".jpg", picture())[1].tobytes()
    thumbnail = cv2.imencode(".jpg", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    exif = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    whole = data[:2] + exif + data[2:]
    assert decoded(compressed_cdr(whole), decode_compressed_image).image.shape == (48, 64, 3)
    buffer = decoded(compressed_cdr(whole[:-200]), decode_compressed_image)
    assert "is damaged: Premature end of JPEG file" in buffer.error


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is neither JPEG nor PNG"),
        (b"\x00\x00\x00\x01\x67", "format 'h264' (5 bytes) is neither JPEG nor PNG"),
        (b"\xff\xd8", "has no frame header"),
        (b"\xff\xd8" + b"\xff" * 5000, "has no frame header"),
        (b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03", "image of 65535 x 65535 pixels"),
        (b"\x89PNG\r\n\x1a\n", "PNG of 8 bytes is truncated"),
        (b"\x89PNG\r\n\x1a\n" + bytes(8) + b"\x7f\xff\xff\xff" * 2, "is larger than the"),
        (b"\x89PNG\r\n\x1a\n" + bytes(11) + b"\x01\x00\x00\x00\x01", "has no end chunk"),
    ],
)
def test_what_is_no_image_is_named(compressed_cdr, data, reason):
    buffer = decoded(compressed_cdr(data, "h264"), decode_compressed_image)
    assert reason in buffer.error


def test_undecodable_body_keeps_header_and_next_frame_is_good(compressed_cdr):
    good = cv2.imencode(".jpg", picture())[1].tobytes()
    scan = good.index(b"\xff\xda")
    bad = good[: good.index(b"\xff\xdb")] + good[scan:]  # without its tables
    buffer = FrameBuffer()
    decode_compressed_image(compressed_cdr(bad, frame_id="front"), buffer)
    assert buffer.error
    assert buffer.header_frame_id == "front"
    decode_compressed_image(compressed_cdr(good), buffer)
    assert buffer.error == ""


@given(st.binary(max_size=400))
def test_random_bytes_are_errors(data):
    for decode in (decode_image, decode_compressed_image):
        assert decoded(data, decode).error
        assert decoded(b"\x00\x01\x00\x00" + data, decode).error


@given(st.data())
def test_flipped_bytes_never_raise(image_cdr, compressed_cdr, data):
    jpeg = cv2.imencode(".jpg", picture())[1].tobytes()
    png = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    raw, decode = data.draw(
        st.sampled_from(
            [
                (image_cdr(np.zeros((2, 12), np.uint8), 4), decode_image),
                (compressed_cdr(jpeg), decode_compressed_image),
                (compressed_cdr(png), decode_compressed_image),
            ]
        )
    )
    changed = bytearray(raw)
    changes = st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255))
    for position, value in data.draw(st.lists(changes, min_size=1, max_size=8)):
        changed[position] = value
    buffer = decoded(bytes(changed), decode)
    if not buffer.error:
        assert buffer.image.ndim == 3
        assert buffer.image.shape[2] == 3
        assert buffer.image.dtype == np.uint8


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (MemoryError(), "image cannot be decoded: MemoryError"),
        (ValueError("two\nlines"), "image cannot be decoded: ValueError: two lines"),
        (cv2.error("OpenCV: no\nmemory"), "image cannot be decoded: OpenCV: no memory"),
    ],
)
def test_whatever_the_decoder_raises_is_an_error_of_the_frame(
    image_cdr, compressed_cdr, monkeypatch, fault, reason
):
    def fail(*_):
        raise fault

    png = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    compressed = compressed_cdr(png)
    raw = image_cdr(np.zeros((2, 6), np.uint8), 2, "rgb8")
    monkeypatch.setattr(cv2, "imdecode", fail)
    monkeypatch.setattr(cv2, "cvtColor", fail)
    assert decoded(compressed, decode_compressed_image).error == reason
    assert decoded(raw).error == reason
