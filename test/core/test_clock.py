"""The manual clock, and the offset between two clocks by bracketed reads."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.clock import ClockOffset, ManualClock, MonotonicClock, read_clock_offset


def test_the_manual_clock_stands_still_until_told():
    clock = ManualClock(5)
    assert (clock.now(), clock.now()) == (5, 5)
    clock.advance(10)
    assert clock.now() == 15
    clock.advance_to(12)
    assert clock.now() == 15
    clock.advance_to(20)
    assert clock.now() == 20


def test_the_manual_clock_never_goes_back():
    with pytest.raises(ValueError, match="back by 1 ns"):
        ManualClock().advance(-1)


def test_the_monotonic_clock_is_clock_monotonic():
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    now = MonotonicClock().now()
    assert before <= now <= time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def reads(*values):
    return iter(values).__next__


def test_the_narrowest_bracket_wins():
    offset = read_clock_offset(reads(0, 100, 200, 210, 300, 350), reads(1050, 1204, 1330), 3)
    assert offset == ClockOffset(1204 - 205, 5)


def test_half_of_an_odd_bracket_is_rounded_up():
    assert read_clock_offset(reads(0, 7), reads(3), 1) == ClockOffset(0, 4)


@given(
    st.integers(-(10**18), 10**18),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=5),
)
def test_the_true_offset_lies_within_the_stated_error(true_offset, delays):
    monotonic, realtime, now = [], [], 1000
    for before, after in delays:
        monotonic.append(now)
        realtime.append(now + before + true_offset)
        now += before + after
        monotonic.append(now)
    offset = read_clock_offset(reads(*monotonic), reads(*realtime), len(delays))
    assert abs(offset.offset_ns - true_offset) <= offset.error_ns
    assert offset.error_ns == min((a + b + 1) // 2 for a, b in delays)
