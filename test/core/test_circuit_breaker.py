"""The breaker on instants that are handed in: scripted lives, then random ones."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from perception_rt.core.circuit_breaker import BreakerConfig, BreakerState, CircuitBreaker
from perception_rt.core.clock import NS_PER_S
from perception_rt.core.errors import UsageError
from perception_rt.core.supervision import SupervisionConfig

S = NS_PER_S
CLOSED, OPEN, HALF_OPEN = BreakerState
START = 100 * S


def opened(at_ns=START):
    breaker = CircuitBreaker()
    breaker.bad(at_ns, "NaN")
    breaker.bad(at_ns, "NaN")
    assert breaker.state == OPEN
    return breaker


def close(breaker, at_ns):
    breaker.probed(at_ns, "")
    for _ in range(10):
        breaker.good(at_ns)
    assert breaker.state == CLOSED


def test_one_bad_frame_is_tolerated():
    breaker = CircuitBreaker()
    for _ in range(10):
        breaker.bad(START, "late")
        for _ in range(19):
            breaker.good(START)
    assert (breaker.state, breaker.degraded, breaker.openings) == (CLOSED, False, 0)
    assert not breaker.probe_due(START + 1000 * S)


def test_two_bad_frames_in_a_row_open_it():
    breaker = opened()
    assert breaker.degraded
    assert breaker.reason == "2 bad frames in a row, last: NaN"
    assert (breaker.openings, breaker.retry_ns) == (1, START + S)


def test_three_bad_frames_in_twenty_open_it():
    breaker = CircuitBreaker()
    for gap in (9, 8):
        breaker.bad(START, "late")
        for _ in range(gap):
            breaker.good(START)
    breaker.bad(START, "late")
    assert breaker.state == OPEN
    assert breaker.reason == "3 bad frames in the last 20, last: late"


def test_three_bad_frames_in_twenty_one_do_not():
    breaker = CircuitBreaker()
    for gap in (9, 9):
        breaker.bad(START, "late")
        for _ in range(gap):
            breaker.good(START)
    breaker.bad(START, "late")
    assert breaker.state == CLOSED


def test_it_opens_before_the_watchdog_expires():
    limits, watchdog = BreakerConfig(), SupervisionConfig()
    assert limits.in_row < watchdog.consecutive_expired
    assert limits.in_window <= watchdog.window_expired
    assert limits.window == watchdog.window_length


def test_a_dead_backend_opens_it_at_once():
    breaker = CircuitBreaker()
    breaker.trip(START, "illegal address")
    assert (breaker.state, breaker.reason) == (OPEN, "illegal address")
    breaker.trip(START + S, "again")
    assert (breaker.openings, breaker.reason) == (1, "illegal address")


def test_frames_of_another_backend_say_nothing_while_open():
    breaker = opened()
    for _ in range(100):
        breaker.good(START)
    breaker.bad(START, "late")
    assert (breaker.state, breaker.openings, breaker.retry_ns) == (OPEN, 1, START + S)


def test_a_probe_is_due_after_the_wait_and_brings_it_on_trial():
    breaker = opened()
    assert not breaker.probe_due(START + S - 1)
    assert breaker.probe_due(START + S)
    breaker.probed(START + S, "")
    assert breaker.state == HALF_OPEN
    assert breaker.degraded
    for _ in range(9):
        breaker.good(START + 2 * S)
    assert breaker.state == HALF_OPEN
    breaker.good(START + 2 * S)
    assert (breaker.state, breaker.reason, breaker.degraded) == (CLOSED, "", False)


def test_one_bad_frame_on_trial_opens_it_again_for_longer():
    breaker = opened()
    breaker.probed(START + S, "")
    breaker.good(START + S)
    breaker.bad(START + S, "late")
    assert breaker.state == OPEN
    assert breaker.reason == "frame 2 on trial: late"
    assert breaker.retry_ns == START + 3 * S


def test_probes_that_fail_wait_twice_as_long_up_to_a_minute():
    breaker = opened()
    now = breaker.retry_ns
    waits = []
    for _ in range(8):
        breaker.probed(now, "no answer")
        waits.append((breaker.retry_ns - now) // S)
        now = breaker.retry_ns
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60]
    assert breaker.reason == "2 bad frames in a row, last: NaN"


def test_one_that_flaps_waits_longer_each_time_and_is_forgiven_after_a_calm_minute():
    breaker = opened()
    close(breaker, START + S)
    again = START + 60 * S
    breaker.trip(again, "NaN")
    assert breaker.retry_ns == again + 2 * S
    close(breaker, again + 2 * S)
    calm = again + 62 * S
    breaker.trip(calm, "NaN")
    assert breaker.retry_ns == calm + S


def test_probes_outside_open_are_ignored():
    breaker = CircuitBreaker()
    breaker.probed(START, "")
    breaker.probed(START, "fault")
    assert breaker.state == CLOSED


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"in_row": 0}, "at least 1"),
        ({"trial_frames": 0}, "at least 1"),
        ({"wait_ns": 0}, "at least 1"),
        ({"in_window": 21}, "in_window <= window <= 64 must hold, got 21, 20"),
        ({"window": 65}, "got 3, 65"),
        ({"wait_most_ns": 1}, "at least wait_ns"),
        ({"calm_ns": -1}, "not negative"),
    ],
)
def test_limits_that_cannot_be_are_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        BreakerConfig(**changes)


class Life(RuleBasedStateMachine):
    """Any order of frames, probes and pauses, against what the test keeps itself."""

    def __init__(self):
        super().__init__()
        self.breaker = CircuitBreaker()
        self.now = 0
        self.frames = []  # of the backend since it was last trusted
        self.trial = 0
        self.opened_at = 0

    def expect_open(self):
        assert self.breaker.state == OPEN
        assert self.breaker.reason
        assert S <= self.breaker.retry_ns - self.now <= 60 * S
        self.opened_at = self.now

    @rule(ns=st.integers(0, 100 * S))
    def wait(self, ns):
        before = self.breaker.state
        self.now += ns
        assert self.breaker.state == before, "time alone changes nothing"

    @rule(good=st.booleans())
    def frame(self, good):
        before, openings = self.breaker.state, self.breaker.openings
        if good:
            self.breaker.good(self.now)
        else:
            self.breaker.bad(self.now, "x")
        if before == OPEN:
            assert (self.breaker.state, self.breaker.openings) == (OPEN, openings)
        elif before == HALF_OPEN:
            if not good:
                self.expect_open()
                return
            self.trial += 1
            assert self.breaker.state == (CLOSED if self.trial == 10 else HALF_OPEN)
            self.frames = []
        else:
            self.frames.append(not good)
            if self.frames[-2:] == [True, True] or sum(self.frames[-20:]) >= 3:
                self.expect_open()
                self.frames = []
            else:
                assert self.breaker.state == CLOSED

    @rule()
    def dies(self):
        was_open = self.breaker.state == OPEN
        self.breaker.trip(self.now, "dead")
        if not was_open:
            self.expect_open()
            self.frames = []

    @rule(fault=st.sampled_from(["", "fault"]))
    def probe(self, fault):
        due = self.breaker.probe_due(self.now)
        assert due <= (self.breaker.state == OPEN)
        if not due:
            return
        assert self.now >= self.opened_at + S
        self.breaker.probed(self.now, fault)
        if fault:
            self.expect_open()
        else:
            assert self.breaker.state == HALF_OPEN
            self.trial = 0

    @invariant()
    def degraded_has_its_reason(self):
        breaker = self.breaker
        assert breaker.degraded is (breaker.state != CLOSED)
        assert bool(breaker.reason) is breaker.degraded


Life.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestLife = Life.TestCase
