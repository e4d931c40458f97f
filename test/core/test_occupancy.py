from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.occupancy import Occupancy

MS = NS_PER_MS


def spend(o, start_ns, end_ns):
    o.launched(start_ns)
    o.idle(end_ns)


def test_the_period_is_counted_by_delivery_numbers():
    o = Occupancy()
    o.frame(1, 0, 1_000 * MS)
    assert o.period_ns == 0
    o.frame(2, 0, 1_100 * MS)
    assert o.period_ns == 100 * MS
    o.frame(5, 0, 1_400 * MS)
    assert o.period_ns == 100 * MS


def test_a_jump_back_keeps_the_period_and_starts_anew():
    o = Occupancy()
    o.frame(1, 0, 1_000 * MS)
    o.frame(2, 0, 1_040 * MS)
    o.frame(3, 1, 5 * MS)
    assert o.period_ns == 40 * MS
    o.frame(4, 1, 55 * MS)
    assert o.period_ns == 50 * MS


def test_a_slower_camera_is_noticed():
    o = Occupancy()
    stamp = 0
    for i in range(100):
        stamp += (40 if i < 50 else 100) * MS
        o.frame(i, 0, stamp)
    assert o.period_ns == 100 * MS


def test_nothing_bounds_the_first_frame():
    assert Occupancy().release_by_ns(0) is None


@pytest.mark.parametrize("now_ms", [0, 40, 70])
def test_the_frame_after_the_next_bounds_the_release(now_ms):
    o = Occupancy()
    o.frame(1, 0, -40 * MS)
    o.frame(2, 0, 0)
    assert o.release_by_ns(now_ms * MS) == 80 * MS


def test_busy_time_is_paid_back_at_the_cap():
    o = Occupancy(cap=0.9, burst_ns=20 * MS)
    assert o.release_by_ns(0) is None
    spend(o, 0, 100 * MS)  # 20 saved, 100 spent, 90 earned meanwhile
    assert o.release_by_ns(100 * MS) is None
    spend(o, 100 * MS, 400 * MS)
    assert o.release_by_ns(400 * MS) == 400 * MS  # 10 - 300 + 270
    assert o.release_by_ns(422 * MS) == 422 * MS
    assert o.release_by_ns(423 * MS) is None
    spend(o, 2_000 * MS, 2_210 * MS)  # no more than 20 is ever saved: 20 - 210 + 189
    assert o.release_by_ns(2_210 * MS) == 2_210 * MS


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=50, max_size=300))
def test_never_above_the_cap_over_a_long_run(steps):
    """Who launches only what is allowed is busy for no more than the cap, a burst and a run."""
    o = Occupancy()
    now = busy = 0
    for idle_ms, run_ms in steps:
        now += idle_ms * MS
        run = run_ms * MS
        if o.release_by_ns(now) is None:
            spend(o, now, now + run)
            now += run
            busy += run
    assert busy <= 0.9 * now + 25 * MS + 60 * MS


def test_while_busy_nothing_is_saved_up_before_it_is_charged():
    o = Occupancy(burst_ns=20 * MS)
    o.launched(0)
    o.launched(5 * MS)
    assert o.release_by_ns(50 * MS) is None
    o.idle(100 * MS)  # 20 - 100 + 90
    assert o.release_by_ns(100 * MS) is None
    o.launched(100 * MS)
    o.idle(210 * MS)  # 10 - 110 + 99
    assert o.release_by_ns(210 * MS) == 210 * MS
    o.idle(300 * MS)
    assert o.release_by_ns(212 * MS) is None
