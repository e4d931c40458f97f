from __future__ import annotations

import json
from collections import deque

import pytest

from perception_rt.capture.slot import NewestSlot
from perception_rt.capture.source import SourceEvent
from perception_rt.core.clock import ManualClock
from perception_rt.core.errors import UsageError
from perception_rt.core.frame import Outcome, StampSource
from perception_rt.runtime.capture_loop import CaptureLoop, SourceLog
from perception_rt.runtime.shared_state import SharedState, SourceState, WorkerState


class ScriptedSource:
    """Gives its events in order, then asks the loop to stop."""

    stamp_source = StampSource.SIMULATED

    def __init__(self, state, events):
        self.state = state
        self.events = list(events)
        self.starts = 0

    def start(self, start_ns):
        self.starts += 1

    def open(self):
        """Nothing to open."""

    def sample(self, buffer):
        return False

    def close(self):
        """Nothing to close."""

    def read(self, buffer, until_ns):
        event = self.events.pop(0)
        if not self.events:
            self.state.stop = 1
        buffer.error = ""
        if isinstance(event, Exception):
            raise event
        if event == "bad":
            buffer.error = "not an image"
            return SourceEvent.FRAME
        return event


@pytest.fixture
def state():
    block = SharedState.create()
    block.worker_state = WorkerState.ACTIVE
    block.active = 1
    block.budget_ns = 50
    yield block
    block.close()


def make(state, events, log=None):
    slot, dropped = NewestSlot(4), deque()
    loop = CaptureLoop(
        ScriptedSource(state, events), slot, dropped, state, 3, log, ManualClock(1000)
    )
    return loop, slot, dropped


def test_ids_count_deliveries_and_the_newest_frame_stays(state):
    loop, slot, dropped = make(state, [SourceEvent.FRAME] * 3)
    loop.run()
    assert state.delivered_frames == 3
    assert [(r.frame_id, r.outcome) for r in dropped] == [
        (1, Outcome.REPLACED),
        (2, Outcome.REPLACED),
    ]
    newest = slot.take()
    assert newest is not None
    assert newest.frame_id == 3
    assert not loop.running


def test_an_undecodable_frame_is_a_failed_one_with_its_reason(state):
    loop, slot, dropped = make(state, ["bad", SourceEvent.FRAME])
    loop.run()
    assert [(r.frame_id, r.outcome, r.reason) for r in dropped] == [
        (1, Outcome.FAILED, "not an image")
    ]
    newest = slot.take()
    assert newest is not None
    assert newest.frame_id == 2


def test_a_jump_is_a_new_epoch_and_an_end_is_told(state):
    loop, slot, _ = make(
        state, [SourceEvent.FRAME, SourceEvent.JUMP, SourceEvent.FRAME, SourceEvent.LOST]
    )
    loop.run()
    newest = slot.take()
    assert newest is not None
    assert newest.epoch == 1
    assert state.source_state == SourceState.LOST


def test_a_source_that_raises_leaves_nobody_waiting(state):
    loop, _, _ = make(state, [SourceEvent.FRAME, MemoryError("none left"), SourceEvent.FRAME])
    with pytest.raises(MemoryError):
        loop.run()
    assert not loop.running


def test_the_log_has_one_line_per_delivered_frame(state, tmp_path):
    log = SourceLog(tmp_path / "log", capacity=2)
    loop, _, _ = make(state, ["bad", SourceEvent.FRAME, SourceEvent.FRAME], log)
    loop.run()
    log.write()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line.get("frame_id") for line in lines[:2]] == [1, 2]
    assert lines[2] == {"overflow": 1}


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        SourceLog(tmp_path / "no" / "log")
