"""Bags, messages and images that the capture tests are made from."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

STORE = get_typestore(Stores.ROS2_HUMBLE)
IMAGE = "sensor_msgs/msg/Image"
COMPRESSED = "sensor_msgs/msg/CompressedImage"


def _header(stamp_ns: int, frame_id: str) -> Any:
    sec, nanosec = divmod(stamp_ns, 10**9)
    stamp = STORE.types["builtin_interfaces/msg/Time"](sec=sec, nanosec=nanosec)
    return STORE.types["std_msgs/msg/Header"](stamp=stamp, frame_id=frame_id)


@pytest.fixture(scope="session")
def image_cdr() -> Callable[..., bytes]:
    """Serialize a sensor_msgs/Image, by rosbags: an implementation that is not ours."""

    def make(
        rows: np.ndarray,
        width: int,
        encoding: str = "bgr8",
        stamp_ns: int = 1_500_000_000,
        frame_id: str = "cam",
        step: int | None = None,
        height: int | None = None,
    ) -> bytes:
        message = STORE.types[IMAGE](
            header=_header(stamp_ns, frame_id),
            height=rows.shape[0] if height is None else height,
            width=width,
            encoding=encoding,
            is_bigendian=0,
            step=rows.shape[1] if step is None else step,
            data=rows.reshape(-1),
        )
        return bytes(STORE.serialize_cdr(message, IMAGE))

    return make


@pytest.fixture(scope="session")
def compressed_cdr() -> Callable[..., bytes]:
    """Serialize a sensor_msgs/CompressedImage, by rosbags."""

    def make(
        data: bytes, fmt: str = "jpeg", stamp_ns: int = 1_500_000_000, frame_id: str = "cam"
    ) -> bytes:
        message = STORE.types[COMPRESSED](
            header=_header(stamp_ns, frame_id), format=fmt, data=np.frombuffer(data, np.uint8)
        )
        return bytes(STORE.serialize_cdr(message, COMPRESSED))

    return make


Messages = Sequence[tuple[int, bytes]]


@pytest.fixture
def write_bag(tmp_path: Path) -> Callable[..., Path]:
    """Write a rosbag2 directory: topics as {(name, type): [(log time, serialized bytes)]}."""

    def write(
        topics: dict[tuple[str, str], Messages],
        name: str = "bag",
        plugin: StoragePlugin = StoragePlugin.MCAP,
        **options: Any,
    ) -> Path:
        path = tmp_path / name
        writer = Writer(path, version=8, storage_plugin=plugin)
        if options:
            writer.set_compression(**options)
        with writer:
            merged = []
            for (topic, kind), messages in topics.items():
                if kind in STORE.fielddefs:
                    connection = writer.add_connection(topic, kind, typestore=STORE)
                else:  # a type that nobody here knows
                    connection = writer.add_connection(
                        topic, kind, msgdef="int32 x\n", rihs01="RIHS01_" + "0" * 64
                    )
                merged += [(log_ns, connection, raw) for log_ns, raw in messages]
            for log_ns, connection, raw in sorted(merged, key=lambda m: m[0]):
                writer.write(connection, log_ns, raw)
        return path

    return write


@pytest.fixture
def grey_frames(image_cdr: Callable[..., bytes]) -> Callable[[int], list[tuple[int, bytes]]]:
    """``n`` images of 4 x 2 pixels, frame k of grey k, 100 ms apart, logged 7 ms later."""

    def make(n: int) -> list[tuple[int, bytes]]:
        frames = []
        for k in range(n):
            stamp_ns = 10**9 + k * 100_000_000
            raw = image_cdr(np.full((2, 12), k, np.uint8), 4, stamp_ns=stamp_ns)
            frames.append((stamp_ns + 7_000_000, raw))
        return frames

    return make


@pytest.fixture(scope="session")
def string_cdr() -> Callable[[str], bytes]:
    """Serialize a std_msgs/String by hand."""

    def make(text: str) -> bytes:
        data = text.encode() + b"\x00"
        return b"\x00\x01\x00\x00" + struct.pack("<I", len(data)) + data

    return make
