"""The vocabulary of frames: values that messages and records rely on."""

from __future__ import annotations

import numpy as np
import pytest

from perception_rt.core.frame import (
    MAX_SEGMENTS,
    RECORD_DTYPE,
    STAGE_COUNT,
    FrameBuffer,
    FrameRecord,
    Outcome,
    Stage,
    StampSource,
    stage_name,
)


def test_seven_outcomes_of_which_three_are_met():
    assert [(o.name, int(o), o.met) for o in Outcome] == [
        ("OK", 0, True),
        ("EARLY", 1, True),
        ("OVERRUN", 2, True),
        ("LATE", 3, False),
        ("EXPIRED", 4, False),
        ("REPLACED", 5, False),
        ("FAILED", 6, False),
    ]


@pytest.mark.parametrize(
    ("index", "name"),
    [
        (Stage.CAPTURE, "capture"),
        (Stage.QUEUE, "queue"),
        (Stage.PREPROCESS, "preprocess"),
        (Stage.POSTPROCESS, "postprocess"),
        (Stage.PUBLISH, "publish"),
        (Stage.SEGMENT_0, "segment 0"),
        (Stage.SEGMENT_0 + 7, "segment 7"),
    ],
)
def test_stage_names(index, name):
    assert stage_name(index) == name


def test_the_message_definitions_agree(repository):
    messages = repository / "interfaces" / "perception_rt_msgs" / "msg"
    text = (messages / "FrameTiming.msg").read_text()
    for outcome in Outcome:
        assert f"uint8 OUTCOME_{outcome.name}={outcome.value} " in text
    for source in StampSource:
        assert f"uint8 STAMP_{source.name}={source.value} " in text


def test_a_record_has_a_fixed_size_without_padding():
    assert STAGE_COUNT == 5 + MAX_SEGMENTS
    assert RECORD_DTYPE.itemsize == 64 + 16 * STAGE_COUNT
    assert RECORD_DTYPE.fields is not None
    assert all(
        RECORD_DTYPE.fields[n][1] % 8 == 0 for n in ("header_stamp_ns", "start_ns", "end_ns")
    )


def test_a_buffer_is_reused_until_frames_grow():
    buffer = FrameBuffer()
    first = buffer.reserve(4, 6)
    assert first.shape == (4, 6, 3)
    assert first.dtype == np.uint8
    assert buffer.reserve(4, 6) is first
    storage = buffer.storage
    assert buffer.reserve(2, 3).shape == (2, 3, 3)
    assert buffer.storage is storage
    assert buffer.reserve(8, 6).shape == (8, 6, 3)
    assert buffer.storage is not storage


def make_buffer():
    buffer = FrameBuffer()
    buffer.frame_id, buffer.epoch = 12, 2
    buffer.stamp_source = StampSource.SIMULATED
    buffer.capture_stamp_ns, buffer.header_stamp_ns = 1_000, 77
    buffer.header_frame_id = "camera"
    buffer.capture_start_ns, buffer.capture_end_ns = 1_010, 1_020
    buffer.clock_offset_ns, buffer.clock_offset_error_ns = 5, 1
    return buffer


def test_a_record_begins_with_the_frame_and_forgets_the_last_one():
    record = FrameRecord(exit_count=3)
    record.outcome, record.exit_head, record.detection_count = Outcome.OK, 2, 9
    record.left_ns, record.reason = 999, "old"
    record.start_ns[Stage.PUBLISH] = record.end_ns[Stage.PUBLISH] = 5
    record.begin(make_buffer(), 300)
    assert (record.frame_id, record.epoch, record.header_frame_id) == (12, 2, "camera")
    assert (record.capture_stamp_ns, record.budget_ns, record.deadline_ns) == (1_000, 300, 1_300)
    assert (record.outcome, record.exit_head, record.detection_count) == (Outcome.FAILED, -1, 0)
    assert (record.left_ns, record.reason, record.exit_count) == (0, "", 3)
    spans = {Stage(i): (s, e) for i, (s, e) in enumerate(zip(record.start_ns, record.end_ns)) if s}
    assert spans == {Stage.CAPTURE: (1_010, 1_020)}


def test_a_row_carries_every_field():
    record = FrameRecord(exit_count=3)
    record.begin(make_buffer(), 300)
    record.outcome, record.exit_head, record.left_ns = Outcome.EARLY, 1, 1_200
    record.detection_count = 4
    row = np.array([record.as_row()], RECORD_DTYPE)[0]
    fields = {name: row[name].tolist() for name in RECORD_DTYPE.names or ()}
    assert fields.pop("start_ns") == [1_010] + [0] * 12
    assert fields.pop("end_ns") == [1_020] + [0] * 12
    assert fields == {
        "frame_id": 12,
        "epoch": 2,
        "detection_count": 4,
        "outcome": 1,
        "stamp_source": 4,
        "exit_head": 1,
        "exit_count": 3,
        "reserved": 0,
        "header_stamp_ns": 77,
        "capture_stamp_ns": 1_000,
        "budget_ns": 300,
        "deadline_ns": 1_300,
        "left_ns": 1_200,
    }
