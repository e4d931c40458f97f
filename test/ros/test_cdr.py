"""Bytes are compared through rclpy's own decoding, never as bytes: padding has no value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("rclpy", reason="ROS 2 is not in this environment")

from perception_rt_msgs.msg import FrameTiming, StageTiming, WorkerHeartbeat
from rclpy.serialization import deserialize_message, serialize_message
from vision_msgs.msg import Detection2D, Detection2DArray, ObjectHypothesisWithPose

from perception_rt.core.frame import FrameRecord, Outcome, Stage, StampSource
from perception_rt.ros.cdr import DetectionsEncoder, FrameTimingEncoder, encode_heartbeat
from perception_rt.runtime.publisher import Heartbeat

LABELS = ["", "a", "car", "person", "teddy bear", "café", "traffic light"]
PIXEL = st.floats(-1e4, 1e4, width=32)
STAMP = st.integers(0, (2**31 - 1) * 10**9 + 999_999_999)
TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12)
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)


def decode(data: bytes, kind: Any) -> Any:
    assert type(data) is bytes
    return deserialize_message(data, kind)


def expected_detections(
    stamp_ns: int, frame_id: str, rows: list[tuple[Any, ...]]
) -> Detection2DArray:
    message = Detection2DArray()
    message.header.stamp.sec, message.header.stamp.nanosec = divmod(stamp_ns, 10**9)
    message.header.frame_id = frame_id
    for left, top, right, bottom, score, class_id in rows:
        detection = Detection2D(header=message.header)
        result = ObjectHypothesisWithPose()
        result.hypothesis.class_id = LABELS[class_id]
        result.hypothesis.score = score
        detection.results.append(result)
        detection.bbox.center.position.x = (left + right) / 2
        detection.bbox.center.position.y = (top + bottom) / 2
        detection.bbox.size_x = right - left
        detection.bbox.size_y = bottom - top
        message.detections.append(detection)
    return message


def encode_rows(
    encoder: DetectionsEncoder, stamp_ns: int, frame_id: str, rows: list[tuple[Any, ...]]
) -> bytes:
    table = np.array([row[:5] for row in rows], np.float32).reshape(-1, 5)
    ids = np.array([row[5] for row in rows], np.int32)
    return encoder.encode(stamp_ns, frame_id, table[:, :4], table[:, 4], ids, len(rows))


ROWS = st.lists(
    st.tuples(
        PIXEL, PIXEL, PIXEL, PIXEL, st.floats(0, 1, width=32), st.integers(0, len(LABELS) - 1)
    ),
    max_size=100,
)


@given(st.lists(st.tuples(STAMP, TEXT, ROWS), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_detections_decode_to_what_was_seen(messages: list[tuple[int, str, list[Any]]]) -> None:
    encoder = DetectionsEncoder(LABELS, capacity=100)
    for stamp_ns, frame_id, rows in messages:
        data = encode_rows(encoder, stamp_ns, frame_id, rows)
        assert decode(data, Detection2DArray) == expected_detections(stamp_ns, frame_id, rows)


def test_detections_have_the_size_that_rclpy_gives_them() -> None:
    encoder = DetectionsEncoder(LABELS, capacity=100)
    for frame_id in ("", "cam", "camera", "camera_left"):
        for class_id in range(len(LABELS)):
            rows = [(1.0, 2.0, 5.0, 8.0, 0.5, class_id)] * 3
            ours = encode_rows(encoder, 7, frame_id, rows)
            theirs = serialize_message(expected_detections(7, frame_id, rows))
            # rmw pads its buffers at the end to a multiple of 4.
            assert 0 <= len(theirs) - len(ours) < 4


def test_one_detection_field_by_field() -> None:
    encoder = DetectionsEncoder(["person", "car"], capacity=4)
    data = encode_rows(
        encoder, 1_500_000_000_000_000_003, "camera", [(10.0, 20.0, 40.0, 80.0, 0.75, 1)]
    )
    message = decode(data, Detection2DArray)
    assert (message.header.stamp.sec, message.header.stamp.nanosec) == (1_500_000_000, 3)
    assert message.header.frame_id == "camera"
    (detection,) = message.detections
    assert detection.header == message.header
    assert detection.id == ""
    assert detection.bbox.center.position.x == 25.0
    assert detection.bbox.center.position.y == 50.0
    assert detection.bbox.center.theta == 0.0
    assert (detection.bbox.size_x, detection.bbox.size_y) == (30.0, 60.0)
    assert detection.results[0].hypothesis.score == 0.75
    assert detection.results[0].pose.pose.orientation.w == 1.0


def test_an_empty_array_is_a_message() -> None:
    message = decode(encode_rows(DetectionsEncoder(LABELS, 10), 5, "c", []), Detection2DArray)
    assert message.detections == []
    assert message.header.frame_id == "c"


def test_fewer_detections_than_the_time_before_leave_nothing_behind() -> None:
    encoder = DetectionsEncoder(LABELS, capacity=10)
    encode_rows(encoder, 1, "c", [(0.0, 0.0, 9.0, 9.0, 0.9, 6)] * 10)
    rows = [(1.0, 1.0, 2.0, 2.0, 0.5, 1)]
    assert decode(encode_rows(encoder, 2, "c", rows), Detection2DArray) == expected_detections(
        2, "c", rows
    )


@given(
    stamp=STAMP,
    frame_id=TEXT,
    numbers=st.lists(INT64, min_size=6, max_size=6),
    ended=st.sets(st.integers(0, 12)),
    outcome=st.sampled_from(Outcome),
    totals=st.lists(UINT64, min_size=7, max_size=7),
    exit_head=st.integers(-1, 7),
    session=UINT64,
)
@settings(max_examples=100, deadline=None)
def test_frame_timing_decodes_to_the_record(
    stamp: int,
    frame_id: str,
    numbers: list[int],
    ended: set[int],
    outcome: Outcome,
    totals: list[int],
    exit_head: int,
    session: int,
) -> None:
    record = FrameRecord(exit_count=8)
    record.header_stamp_ns = stamp
    record.header_frame_id = frame_id
    record.frame_id = 2**64 - 1
    record.epoch = 4_000_000_000
    record.stamp_source = StampSource.SIMULATED
    record.outcome = outcome
    record.exit_head = exit_head
    record.detection_count = 17
    record.capture_stamp_ns, record.budget_ns, record.deadline_ns = numbers[:3]
    record.left_ns, record.clock_offset_ns, record.clock_offset_error_ns = numbers[3:]
    record.reason = "bad step"
    for index in ended:
        record.start_ns[index], record.end_ns[index] = 1000 + index, 2000 + index
    encoder = FrameTimingEncoder()
    encoder.session_id = session
    message = decode(encoder.encode(record, totals), FrameTiming)
    assert message.header.stamp.sec * 10**9 + message.header.stamp.nanosec == stamp
    assert message.header.frame_id == frame_id
    assert message.session_id == session
    assert message.frame_id == 2**64 - 1
    assert message.epoch == 4_000_000_000
    assert message.stamp_source == FrameTiming.STAMP_SIMULATED
    assert message.outcome == outcome
    assert message.exit_head == exit_head
    assert message.exit_count == 8
    assert message.detection_count == 17
    assert [message.capture_stamp_ns, message.budget_ns, message.deadline_ns] == numbers[:3]
    assert [message.left_ns, message.clock_offset_ns, message.clock_offset_error_ns] == numbers[3:]
    assert message.outcome_totals.tolist() == totals
    assert message.reason == ("bad step" if outcome == Outcome.FAILED else "")
    seen = {
        (stage.stage, stage.segment): (stage.start_ns, stage.end_ns) for stage in message.stages
    }
    assert seen == {stage_key(index): (1000 + index, 2000 + index) for index in ended}


def stage_key(index: int) -> tuple[int, int]:
    if index >= Stage.SEGMENT_0:
        return StageTiming.STAGE_SEGMENT, index - Stage.SEGMENT_0
    names = {
        Stage.CAPTURE: StageTiming.STAGE_CAPTURE,
        Stage.QUEUE: StageTiming.STAGE_QUEUE,
        Stage.PREPROCESS: StageTiming.STAGE_PREPROCESS,
        Stage.POSTPROCESS: StageTiming.STAGE_POSTPROCESS,
        Stage.PUBLISH: StageTiming.STAGE_PUBLISH,
    }
    return names[Stage(index)], -1


def test_stages_come_in_the_order_in_which_they_run() -> None:
    record = FrameRecord(exit_count=3)
    order = [0, 1, 2, Stage.SEGMENT_0, Stage.SEGMENT_0 + 1, Stage.POSTPROCESS, Stage.PUBLISH]
    for instant, index in enumerate(order):
        record.start_ns[index], record.end_ns[index] = 10 + instant, 11 + instant
    # Launched and still draining when the frame was closed: it has a start and no end.
    record.start_ns[Stage.SEGMENT_0 + 2] = 15
    message = decode(FrameTimingEncoder().encode(record, [0] * 7), FrameTiming)
    assert [stage.start_ns for stage in message.stages] == [10, 11, 12, 13, 14, 15, 16]
    assert [stage.segment for stage in message.stages] == [-1, -1, -1, 0, 1, -1, -1]


@pytest.mark.parametrize(
    ("reason", "sent"),
    [
        ("two\nlines\tof it ", "two lines of it"),
        ("x" * 300, "x" * 200),
        ("é" * 150, "é" * 100),
        ("a" + "é" * 150, "a" + "é" * 99),
    ],
)
def test_a_reason_is_one_bounded_line(reason: str, sent: str) -> None:
    record = FrameRecord()
    record.reason = reason
    assert decode(FrameTimingEncoder().encode(record, [0] * 7), FrameTiming).reason == sent


def test_a_stamp_outside_ros_time_is_held_at_its_bound() -> None:
    encoder = DetectionsEncoder(LABELS, 1)
    for stamp_ns, sec in ((2**31 * 10**9, 2**31 - 1), (-(2**31) * 10**9 - 1, -(2**31))):
        assert (
            decode(encode_rows(encoder, stamp_ns, "", []), Detection2DArray).header.stamp.sec
            == sec
        )


def test_scores_keep_their_float32_value() -> None:
    message = decode(
        encode_rows(DetectionsEncoder(LABELS, 1), 0, "", [(0.0, 0.0, 1.0, 1.0, 0.1, 2)]),
        Detection2DArray,
    )
    assert math.isclose(message.detections[0].results[0].hypothesis.score, 0.1, rel_tol=1e-7)


@given(st.lists(UINT64, min_size=14, max_size=14), INT64, st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_heartbeat_decodes_to_its_fields(
    values: list[int], stamp_ns: int, activation: int
) -> None:
    beat = Heartbeat(session_id=values[0], node_session_id=values[1])
    beat.stamp_ns = stamp_ns
    beat.activation_count = activation
    beat.state = 2
    beat.sequence, beat.capture_count, beat.deadline_count = values[2:5]
    beat.inference_count, beat.delivered_frames = values[5:7]
    beat.outcome_totals = values[7:14]
    beat.source_state = 1
    beat.stamp_source = 4
    beat.degraded = activation % 2 == 1
    message = decode(encode_heartbeat(beat), WorkerHeartbeat)
    for name in Heartbeat.__slots__:
        if name != "outcome_totals":
            assert getattr(message, name) == getattr(beat, name), name
    assert message.outcome_totals.tolist() == values[7:14]
