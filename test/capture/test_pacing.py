"""The schedule laid on a clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perception_rt.capture.pacing import Pacer
from perception_rt.core.clock import ManualClock


def pacer_on(clock, rate=1.0, early_ns=0):
    """A pacer whose sleep returns ``early_ns`` before its time."""
    return Pacer(rate, clock.now, lambda s: clock.advance(max(1, round(s * 1e9) - early_ns)))


def test_a_sleep_that_returns_early_is_continued():
    clock = ManualClock(0)
    assert pacer_on(clock, early_ns=300).wait(1000, 10_000)
    assert clock.now() == 1000


def test_what_is_due_comes_before_the_end_of_waiting():
    clock = ManualClock(500)
    pacer = pacer_on(clock)
    assert pacer.wait(500, 100)
    assert not pacer.wait(501, 500)
    assert clock.now() == 500


@given(
    rate=st.floats(0.01, 100.0),
    offsets=st.lists(st.integers(0, 10**12), min_size=2).map(sorted),
    laps=st.integers(0, 3),
)
def test_due_instants_keep_their_order(rate, offsets, laps):
    pacer = pacer_on(ManualClock(), rate)
    pacer.start(17)
    due = []
    for _ in range(laps + 1):
        due += [pacer.due_ns(offset) for offset in offsets]
        pacer.next_lap(offsets[-1] + 1000)
    assert due == sorted(due)
    assert due[0] == 17 + pacer.scaled_ns(offsets[0])
