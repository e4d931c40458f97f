"""The record array: what is written is read, in any process, and nothing is overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from perception_rt.core.errors import InputError, UnavailableError, UsageError
from perception_rt.core.frame import RECORD_DTYPE, FrameRecord, Outcome, StampSource
from perception_rt.latency.recorder import Recorder


def make_record(frame_id):
    record = FrameRecord(exit_count=3)
    record.frame_id = frame_id
    record.epoch = 2
    record.outcome = Outcome.EARLY
    record.stamp_source = StampSource.SIMULATED
    record.exit_head = -1
    record.detection_count = 4
    record.header_stamp_ns, record.capture_stamp_ns = -5, 2**62
    record.budget_ns, record.deadline_ns, record.left_ns = 6, 7, 8
    record.start_ns = [100 * frame_id + i for i in range(13)]
    record.end_ns = [-100 * frame_id - i for i in range(13)]
    return record


@pytest.fixture
def recorder():
    recorder = Recorder.create(3)
    yield recorder
    recorder.close()


def test_memory_that_the_system_does_not_give_is_unavailable_and_leaves_no_descriptor():
    before = len(list(Path("/proc/self/fd").iterdir()))
    for capacity in (2**48, 2**70):  # beyond the largest file, beyond an integer of the system
        with pytest.raises(UnavailableError, match="ask for a shorter run or free memory"):
            Recorder.create(capacity)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_records_come_back_as_written(recorder):
    records = [make_record(1), make_record(2)]
    assert all(recorder.append(record) for record in records)
    expected = np.array([record.as_row() for record in records], RECORD_DTYPE)
    assert recorder.records().tobytes() == expected.tobytes()
    assert recorder.records()["start_ns"][1].tolist() == [200 + i for i in range(13)]
    assert (recorder.count, recorder.overflow, recorder.capacity) == (2, 0, 3)


def test_an_empty_array_has_no_records(recorder):
    assert recorder.records().shape == (0,)
    assert recorder.records().dtype == RECORD_DTYPE


def test_a_full_array_counts_and_never_overwrites(recorder):
    assert [recorder.append(make_record(i)) for i in range(1, 6)] == [True] * 3 + [False] * 2
    assert recorder.records()["frame_id"].tolist() == [1, 2, 3]
    assert (recorder.count, recorder.overflow) == (3, 2)


def test_a_copy_does_not_change_with_later_records(recorder):
    recorder.append(make_record(1))
    before = recorder.records()
    recorder.append(make_record(2))
    assert before["frame_id"].tolist() == [1]


def test_a_child_process_writes_into_it(recorder):
    recorder.append(make_record(1))
    code = (
        "import sys\n"
        "from perception_rt.core.frame import FrameRecord\n"
        "from perception_rt.latency.recorder import Recorder\n"
        "recorder = Recorder.attach(int(sys.argv[1]))\n"
        "record = FrameRecord(2)\n"
        "for record.frame_id in range(10, 14):\n"
        "    recorder.append(record)\n"
        "recorder.close()\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(recorder.fd)], pass_fds=[recorder.fd], check=True
    )
    assert recorder.records()["frame_id"].tolist() == [1, 10, 11]
    assert recorder.overflow == 2


def test_close_gives_back_the_descriptor_it_made_and_no_other():
    recorder = Recorder.create(1)
    reader = Recorder.attach(recorder.fd)
    reader.close()
    os.fstat(recorder.fd)
    recorder.close()
    recorder.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(recorder.fd)


@pytest.mark.parametrize("content", [b"", b"x" * 63, b"x" * 64, b"PRTREC01" + bytes(400)])
def test_what_is_no_record_array_is_refused(content):
    fd = os.memfd_create("other")
    try:
        os.write(fd, content)
        with pytest.raises(InputError, match=f"file descriptor {fd} "):
            Recorder.attach(fd)
    finally:
        os.close(fd)


def test_a_truncated_array_is_refused(recorder):
    os.ftruncate(recorder.fd, 64 + RECORD_DTYPE.itemsize)
    with pytest.raises(InputError, match="no record array"):
        Recorder.attach(recorder.fd)


def test_a_closed_descriptor_is_refused():
    fd = os.memfd_create("gone")
    os.close(fd)
    with pytest.raises(InputError, match="cannot be used"):
        Recorder.attach(fd)


def test_no_room_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        Recorder.create(0)
