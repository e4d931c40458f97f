"""The newest-frame slot: one writer, one reader, every frame seen exactly once."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from perception_rt.capture.slot import NewestSlot


def put(slot, frame_id):
    buffer = slot.writable()
    buffer.frame_id = frame_id
    return slot.put(buffer)


def take(slot):
    buffer = slot.take()
    assert buffer is not None
    return buffer


def test_the_newest_frame_is_taken_and_the_one_before_is_replaced():
    slot = NewestSlot()
    assert slot.take() is None
    assert not slot.pending
    assert put(slot, 1) is None
    assert slot.pending
    replaced = put(slot, 2)
    assert replaced is not None
    assert replaced.frame_id == 1
    assert take(slot).frame_id == 2
    assert slot.take() is None


def test_writable_is_the_same_until_it_is_put():
    slot = NewestSlot()
    first = slot.writable()
    assert slot.writable() is first
    slot.put(first)
    assert slot.writable() is not first


def test_a_taken_frame_is_not_written_to():
    slot = NewestSlot()
    put(slot, 1)
    taken = take(slot)
    for frame_id in range(2, 50):
        put(slot, frame_id)
    assert taken.frame_id == 1


def test_more_frames_held_than_there_are_buffers_is_an_error():
    slot = NewestSlot(3)
    held = []
    for frame_id in range(1, 4):
        put(slot, frame_id)
        held.append(take(slot))
    with pytest.raises(RuntimeError, match="the reader holds more"):
        slot.writable()
    slot.release(held[0])
    assert slot.writable() is held[0]


def test_too_few_buffers():
    with pytest.raises(ValueError, match="at least 3 buffers, got 2"):
        NewestSlot(2)


def test_wait_sees_a_frame_put_before_and_no_stale_signal():
    slot = NewestSlot()
    put(slot, 1)
    assert slot.wait(0.0)
    assert slot.wait(0.0)
    slot.release(take(slot))
    assert not slot.wait(0.0)  # the signal of frame 1 is used up
    put(slot, 2)
    slot.release(take(slot))  # taken without waiting
    assert not slot.wait(0.0)
    assert not slot.wait(-1.0)


def test_wait_is_woken_by_put():
    slot = NewestSlot()
    seen = []

    def read():
        if slot.wait(60.0):
            seen.append(take(slot).frame_id)

    reader = threading.Thread(target=read)
    reader.start()
    put(slot, 7)
    reader.join(60.0)
    assert seen == [7]


class SlotMachine(RuleBasedStateMachine):
    """Any order of operations of both sides, against sets of frame ids."""

    def __init__(self):
        super().__init__()
        self.slot = NewestSlot(4)
        self.next_id = 1
        self.waiting = None
        self.held = []
        self.seen = []

    @rule()
    def put(self):
        buffer = self.slot.writable()
        assert all(buffer is not held for held in self.held)
        buffer.frame_id = self.next_id
        replaced = self.slot.put(buffer)
        assert (replaced.frame_id if replaced else None) == self.waiting
        if replaced:
            self.seen.append(replaced.frame_id)
        self.waiting = self.next_id
        self.next_id += 1

    @rule()
    def take(self):
        if len(self.held) == 2:  # what a slot of four was made for
            return
        assert self.slot.wait(0.0) == (self.waiting is not None)
        taken = self.slot.take()
        assert (taken.frame_id if taken else None) == self.waiting
        if taken:
            self.seen.append(taken.frame_id)
            self.held.append(taken)
        self.waiting = None

    @rule(which=st.integers(0, 1))
    def release(self, which):
        if which < len(self.held):
            self.slot.release(self.held.pop(which))

    @invariant()
    def every_frame_is_seen_once(self):
        waiting = [] if self.waiting is None else [self.waiting]
        assert sorted(self.seen + waiting) == list(range(1, self.next_id))


TestSlotMachine = SlotMachine.TestCase


@pytest.fixture
def quick_switches():
    """Threads change places within a few bytecodes instead of every 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("quick_switches")
def test_two_threads_lose_duplicate_and_tear_nothing():
    count = 20_000
    slot = NewestSlot()
    replaced, taken, torn = [], [], []
    done = threading.Event()

    def write():
        for frame_id in range(1, count + 1):
            buffer = slot.writable()
            buffer.reserve(16, 16)[:] = frame_id % 251
            buffer.frame_id = frame_id
            old = slot.put(buffer)
            if old is not None:
                replaced.append(old.frame_id)
        done.set()

    def read():
        while not (done.is_set() and not slot.pending):
            if not slot.wait(0.001):
                continue
            buffer = slot.take()
            if buffer is None:
                continue
            frame_id = buffer.frame_id
            if not np.all(buffer.image == frame_id % 251) or buffer.frame_id != frame_id:
                torn.append(frame_id)
            taken.append(frame_id)
            slot.release(buffer)

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert torn == []
    assert taken == sorted(taken)
    assert taken[-1] == count
    assert sorted(taken + replaced) == list(range(1, count + 1))


@pytest.mark.usefixtures("quick_switches")
def test_no_wake_up_is_lost():
    rounds = 3000
    slot = NewestSlot()
    taken = threading.Semaphore(0)
    woken = []

    def read():
        for _ in range(rounds):
            while (buffer := slot.take()) is None:
                if not slot.wait(10.0):
                    return
            woken.append(buffer.frame_id)
            slot.release(buffer)
            taken.release()

    reader = threading.Thread(target=read)
    reader.start()
    for frame_id in range(rounds):
        assert put(slot, frame_id) is None
        if not taken.acquire(timeout=10.0):
            break
    reader.join(60.0)
    assert woken == list(range(rounds))
