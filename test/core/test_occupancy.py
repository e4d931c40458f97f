from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.occupancy import Occupancy

MS = NS_PER_MS


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


@pytest.mark.parametrize(("now_ms", "by_ms"), [(0, 50), (40, 80), (70, 80)])
def test_the_frame_after_the_next_bounds_the_release(now_ms, by_ms):
    o = Occupancy()
    o.frame(1, 0, -40 * MS)
    o.frame(2, 0, 0)
    assert o.release_by_ns(now_ms * MS) == by_ms * MS


def test_busy_time_is_paid_back_at_the_cap():
    o = Occupancy(cap=0.9, burst_ns=50 * MS)
    assert o.release_by_ns(0) == 50 * MS
    o.spend(60 * MS, 60 * MS)
    assert o.release_by_ns(60 * MS) == 50 * MS
    assert o.release_by_ns(70 * MS) == 69 * MS
    assert o.release_by_ns(170 * MS) == 220 * MS


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=50, max_size=300))
def test_never_above_the_cap_over_a_long_run(steps):
    """Who launches only what fits is never busy for more than the cap and one burst."""
    o = Occupancy()
    now = busy = 0
    for idle_ms, run_ms in steps:
        now += idle_ms * MS
        run = run_ms * MS
        if now + run <= o.release_by_ns(now):
            now += run
            busy += run
            o.spend(now, run)
    assert busy <= 0.9 * now + 50 * MS
    assert now < 300 * 100 * MS < 100 * NS_PER_S
