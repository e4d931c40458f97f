"""Messages of the real-time path as CDR bytes, without message objects.

Filling and publishing message objects costs milliseconds at 100 detections; rclpy's ``publish``
takes serialised bytes as they are. Encoding is XCDR1 (OMG DDS-XTypes 1.3, 7.4.3), little endian,
which rmw's default deserialisers read: a 4-byte encapsulation header, then members in order, each
aligned to its own size counted from the end of that header. A string is a uint32 length with the
closing NUL counted, then its UTF-8 bytes and the NUL.

All instants are CLOCK_MONOTONIC nanoseconds, except header stamps (ROS time).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.clock import NS_PER_S
from perception_rt.core.frame import MAX_SEGMENTS, FrameRecord, Outcome, Stage
from perception_rt.runtime.publisher import Heartbeat

MAX_REASON_BYTES = 200
"""Bound of FrameTiming.reason."""

_ENCAPSULATION = b"\x00\x01\x00\x00"
_TIME = struct.Struct("<iI")
_UINT32 = struct.Struct("<I")
_ONE = _UINT32.pack(1)
_INT32_MAX = 2**31 - 1

# FrameTiming.stages: (index in a record, StageTiming.stage, StageTiming.segment), in the order in
# which they run.
_STAGES = (
    (Stage.CAPTURE, 0, -1),
    (Stage.QUEUE, 1, -1),
    (Stage.PREPROCESS, 2, -1),
    *((Stage.SEGMENT_0 + k, 3, k) for k in range(MAX_SEGMENTS)),
    (Stage.POSTPROCESS, 4, -1),
    (Stage.PUBLISH, 5, -1),
)


def _string(text: str) -> bytes:
    data = text.encode()
    return _UINT32.pack(len(data) + 1) + data + b"\0"


def _pad(data: bytes, size: int, start: int = 0) -> bytes:
    """``data`` with zeros up to the next multiple of ``size``, counted from ``start`` bytes before
    it.
    """
    return data + bytes(-(start + len(data)) % size)


def _stamp(ns: int) -> bytes:
    seconds, nanoseconds = divmod(ns, NS_PER_S)
    return _TIME.pack(max(-_INT32_MAX - 1, min(seconds, _INT32_MAX)), nanoseconds)


class DetectionsEncoder:
    """Encodes vision_msgs/Detection2DArray: one hypothesis per detection, its id empty, its pose
    the default.

    What does not change lies ready: a prefix per label up to the score, and a row of 50 eight-byte
        values per
    detection behind it (score, pose, covariance, box, id). Budget: 0.1 ms at 100 detections.

    Args:
        labels: class_id of class 0, 1, ...
        capacity: most detections in one message.
    """

    _SCORE, _ORIENTATION_W, _CENTRE, _SIZE, _ID, _WIDTH = (
        0,
        7,
        slice(44, 46),
        slice(47, 49),
        49,
        50,
    )

    def __init__(self, labels: Sequence[str], capacity: int) -> None:
        self._labels = list(labels)
        self._rows = np.zeros((capacity, self._WIDTH), "<f8")
        self._rows[:, self._ORIENTATION_W] = 1.0
        # The empty id: length 1, NUL, and the padding before the next detection, in one value.
        self._rows.view("<u8")[:, self._ID] = 1
        self._row_bytes = [row.data.cast("B") for row in self._rows]
        self._last_bytes = [row[:-3] for row in self._row_bytes]
        self._frame_id: str | None = None
        self._frame_part = b""
        self._first: list[bytes] = []
        self._next: list[bytes] = []

    def encode(
        self,
        stamp_ns: int,
        frame_id: str,
        boxes: NDArray[np.float32],
        scores: NDArray[np.float32],
        class_ids: NDArray[np.int32],
        count: int,
    ) -> bytes:
        """The message as bytes, header repeated in every detection.

        Args:
            stamp_ns: of the image's header (ROS time).
            frame_id: of the image's header.
            boxes: float32 [>= count, 4]: l, t, r, b in pixels of the source image.
            scores: float32 [>= count], 0 to 1.
            class_ids: int32 [>= count], indices of ``labels``.
            count: detections, at most ``capacity``.
        """
        if frame_id != self._frame_id:
            self._set_frame_id(frame_id)
        stamp = _stamp(stamp_ns)
        parts: list[bytes | memoryview] = [
            _ENCAPSULATION,
            stamp,
            self._frame_part,
            _UINT32.pack(count),
        ]
        if count:
            rows = self._rows[:count]
            corners = boxes[:count]
            rows[:, self._SCORE] = scores[:count]
            np.add(corners[:, :2], corners[:, 2:], out=rows[:, self._CENTRE], dtype=np.float64)
            rows[:, self._CENTRE] *= 0.5
            np.subtract(corners[:, 2:], corners[:, :2], out=rows[:, self._SIZE], dtype=np.float64)
            prefixes = self._first
            for class_id, row in zip(class_ids[:count].tolist(), self._row_bytes):
                parts += (stamp, prefixes[class_id], row)
                prefixes = self._next
            parts[-1] = self._last_bytes[count - 1]
        return b"".join(parts)

    def _set_frame_id(self, frame_id: str) -> None:
        self._frame_id = frame_id
        self._frame_part = _pad(_string(frame_id), 4)
        # The first detection starts behind stamp, frame_id and count; a row ends at a multiple of
        # 8, so do all others.
        start = _TIME.size + len(self._frame_part) + _UINT32.size
        head = self._frame_part + _ONE
        self._first = [
            _pad(head + _string(label), 8, start + _TIME.size) for label in self._labels
        ]
        self._next = [_pad(head + _string(label), 8, _TIME.size) for label in self._labels]


class FrameTimingEncoder:
    """Encodes perception_rt_msgs/FrameTiming from a record. Budget: 20 us.

    Attributes:
        session_id: of the worker process.
    """

    def __init__(self) -> None:
        self.session_id = 0
        self._frame_id: str | None = None
        self._frame_part = b""
        # A stage's two bytes follow the count at once; the instants behind them are aligned to 8.
        layouts = ["4x", *("Bb2x2q" + "Bb6x2q" * n for n in range(len(_STAGES)))]
        self._layouts = [
            struct.Struct(f"<2QI2BbBI4x6qI{stages}{len(Outcome)}Q") for stages in layouts
        ]

    def encode(self, record: FrameRecord, totals: Sequence[int]) -> bytes:
        """The message as bytes; stages that did not end are left out.

        Args:
            record: of the frame.
            totals: frames of this session by outcome, this one counted, index: Outcome.
        """
        if record.header_frame_id != self._frame_id:
            self._frame_id = record.header_frame_id
            self._frame_part = _pad(_string(self._frame_id), 8, _TIME.size)
        stages: list[int] = []
        for index, stage, segment in _STAGES:
            if record.end_ns[index]:
                stages += (stage, segment, record.start_ns[index], record.end_ns[index])
        count = len(stages) // 4
        body = self._layouts[count].pack(
            self.session_id,
            record.frame_id,
            record.epoch,
            record.stamp_source,
            record.outcome,
            record.exit_head,
            record.exit_count,
            record.detection_count,
            record.capture_stamp_ns,
            record.budget_ns,
            record.deadline_ns,
            record.left_ns,
            record.clock_offset_ns,
            record.clock_offset_error_ns,
            count,
            *stages,
            *totals,
        )
        reason = _one_line(record.reason) if record.outcome == Outcome.FAILED else ""
        return b"".join(
            (
                _ENCAPSULATION,
                _stamp(record.header_stamp_ns),
                self._frame_part,
                body,
                _string(reason),
            )
        )


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text.encode()[:MAX_REASON_BYTES].decode(errors="ignore")


_HEARTBEAT = struct.Struct(f"<4sq2QIB3x5Q{len(Outcome)}Q2B?")


def encode_heartbeat(beat: Heartbeat) -> bytes:
    """perception_rt_msgs/WorkerHeartbeat as bytes. Budget: 10 us."""
    return _HEARTBEAT.pack(
        _ENCAPSULATION,
        beat.stamp_ns,
        beat.session_id,
        beat.node_session_id,
        beat.activation_count,
        beat.state,
        beat.sequence,
        beat.capture_count,
        beat.deadline_count,
        beat.inference_count,
        beat.delivered_frames,
        *beat.outcome_totals,
        beat.source_state,
        beat.stamp_source,
        beat.degraded,
    )
