"""The policy's single decisions, and whole frames in a small simulator, scripted and random."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.clock import ManualClock
from perception_rt.core.errors import UsageError
from perception_rt.core.exit_policy import Action, Decision, ExitPolicy
from perception_rt.core.frame import Outcome, Stage
from perception_rt.core.latency_model import LatencyModel

NEVER = 10**15
WAKE = 10  # wake margin of every test
PRE, POST, PUB = 5, 7, 3
MARGIN = POST + PUB + WAKE


def make_policy(segments=(40, 30, 20), look_ahead=0):
    model = LatencyModel(len(segments))
    model.prior(Stage.PREPROCESS, [PRE])
    model.prior(Stage.POSTPROCESS, [POST])
    model.prior(Stage.PUBLISH, [PUB])
    for k, ns in enumerate(segments):
        model.prior(Stage.SEGMENT_0 + k, [ns])
    return ExitPolicy(len(segments), model, WAKE, look_ahead)


def launch(k):
    return Decision(Action.LAUNCH, k)


def wait(until_ns):
    return Decision(Action.WAIT, until_ns=until_ns)


def publish(k, outcome):
    return Decision(Action.PUBLISH, k, outcome=outcome)


LATE = Decision(Action.MISS, outcome=Outcome.LATE)
EXPIRED = Decision(Action.MISS, outcome=Outcome.EXPIRED)
DEADLINE = 200  # deadline - M = 180, latest start 135


def test_margin_and_latest_start():
    policy = make_policy()
    assert policy.margin_ns() == 20
    assert policy.latest_start_ns(DEADLINE) == 135


@pytest.mark.parametrize(
    ("now", "launched", "finished", "busy", "expected"),
    [
        # nothing launched
        (0, -1, -1, False, launch(0)),
        (135, -1, -1, False, launch(0)),
        (136, -1, -1, False, EXPIRED),
        (0, -1, -1, True, wait(135)),
        (134, -1, -1, True, wait(135)),
        (135, -1, -1, True, EXPIRED),
        (500, -1, -1, True, EXPIRED),
        # segment 0 in flight: nothing to fall back on, so wait for the deadline itself
        (50, 0, -1, False, wait(200)),
        (199, 0, -1, False, wait(200)),
        (200, 0, -1, False, LATE),
        (900, 0, -1, False, LATE),
        # segment 0 finished
        (150, 0, 0, False, launch(1)),
        (151, 0, 0, False, publish(0, Outcome.EARLY)),
        (190, 0, 0, False, publish(0, Outcome.EARLY)),  # the wake margin is spent, 10 remain
        (191, 0, 0, False, wait(200)),
        (200, 0, 0, False, LATE),
        # segment 1 in flight above a finished exit
        (160, 1, 0, False, wait(180)),
        (180, 1, 0, False, publish(0, Outcome.OVERRUN)),
        (190, 1, 0, False, publish(0, Outcome.OVERRUN)),
        (191, 1, 0, False, wait(200)),
        (200, 1, 0, False, LATE),
        # deepest
        (100, 2, 2, False, publish(2, Outcome.OK)),
        (185, 2, 2, False, publish(2, Outcome.OK)),
        (170, 2, 1, False, wait(180)),
        (180, 2, 1, False, publish(1, Outcome.OVERRUN)),
    ],
)
def test_decisions(now, launched, finished, busy, expected):
    assert make_policy().decide(now, DEADLINE, launched, finished, busy, 0) == expected


@pytest.mark.parametrize(
    ("now", "launched_at", "launched", "finished", "expected"),
    [
        (0, 0, 0, -1, launch(1)),  # 0 + 5 + 40 + 30 fits
        (106, 105, 0, -1, launch(1)),  # 105 + 45 + 30 = 180
        (106, 106, 0, -1, wait(200)),
        (150, 0, 0, -1, launch(1)),  # overdue: it may finish now
        (151, 0, 0, -1, wait(200)),
        (10, 10, 1, 0, launch(2)),
        (10, 10, 1, -1, wait(200)),  # one segment of look-ahead, not two
        (10, 10, 2, 1, wait(180)),
    ],
)
def test_look_ahead_counts_what_is_in_flight(now, launched_at, launched, finished, expected):
    policy = make_policy(look_ahead=1)
    assert policy.decide(now, DEADLINE, launched, finished, False, launched_at) == expected


def test_a_bound_of_other_frames_never_refuses_the_first_exit():
    policy = make_policy()
    assert policy.decide(0, DEADLINE, -1, -1, False, 0, release_by_ns=1) == launch(0)
    assert policy.decide(50, DEADLINE, 0, 0, False, 0, release_by_ns=80) == launch(1)
    assert policy.decide(50, DEADLINE, 0, 0, False, 0, release_by_ns=79) == publish(
        0, Outcome.EARLY
    )


def test_a_single_exit_is_the_deepest():
    policy = make_policy(segments=(40,))
    assert policy.decide(60, DEADLINE, 0, 0, False, 0) == publish(0, Outcome.OK)


@pytest.mark.parametrize(
    ("exit_count", "wake_margin_ns", "look_ahead"), [(2, 0, 0), (3, -1, 0), (3, 0, 2), (3, 0, -1)]
)
def test_bad_settings_are_refused(exit_count, wake_margin_ns, look_ahead):
    with pytest.raises(UsageError):
        ExitPolicy(exit_count, LatencyModel(3), wake_margin_ns, look_ahead)


class Launch(NamedTuple):
    k: int
    now_ns: int
    start_ns: int
    predicted_start_ns: int


@dataclass
class Run:
    """What became of one simulated frame."""

    decision: Decision
    at_ns: int
    finished: int
    launches: list[Launch] = field(default_factory=list)


def simulate(policy, segments, deadline_ns, real, pre=PRE, drain_until=0, lateness=(0,)):
    """One frame against a backend that runs segment k for ``real[k]``, after an older drain.

    Args:
        segments: quantiles that the policy was given, to predict when a launch can begin.
        real: true durations.
        lateness: how late the caller wakes, in turn.
    """
    clock = ManualClock()
    launches: list[Launch] = []
    ends: list[int] = []
    turn = 0
    for _ in range(4 * len(real) + 8):
        now = clock.now()
        finished = sum(end <= now for end in ends) - 1
        launched = len(ends) - 1
        busy = launched < 0 and drain_until > now
        launched_at = launches[-1].start_ns if launches else 0
        decision = policy.decide(now, deadline_ns, launched, finished, busy, launched_at)
        if decision.action in (Action.PUBLISH, Action.MISS):
            return Run(decision, now, finished, launches)
        if decision.action is Action.LAUNCH:
            k = decision.segment
            assert k == launched + 1
            assert not busy
            start = max(now, ends[-1]) if ends else now
            predicted = now
            if launched > finished:
                expected = segments[launched] + (PRE if launched == 0 else 0)
                predicted = max(now, launched_at + expected)
            launches.append(Launch(k, now, start, predicted))
            ends.append(start + real[k] + (pre if k == 0 else 0))
            continue
        assert decision.until_ns > now, "a wait that ends in the past makes no progress"
        wake = decision.until_ns
        if finished < launched:
            wake = min(wake, ends[finished + 1])
        if busy:
            wake = min(wake, drain_until)
        clock.advance_to(wake + lateness[turn % len(lateness)])
        turn += 1
    raise AssertionError("the frame never came to an end")


@pytest.mark.parametrize(
    ("real", "drain_until", "expected", "at", "head"),
    [
        # segment k and its end: 40 + 5, 30, 20
        ((40, 30, 20), 0, Outcome.OK, 95, 2),
        ((95, 30, 20), 0, Outcome.EARLY, 130, 1),  # 2 would end at 150 + M
        ((40, 85, 20), 0, Outcome.EARLY, 130, 1),
        ((40, NEVER, 20), 0, Outcome.OVERRUN, 130, 0),
        ((40, 30, NEVER), 0, Outcome.OVERRUN, 130, 1),
        ((NEVER, 30, 20), 0, Outcome.LATE, 150, -1),
        ((135, 30, 20), 0, Outcome.EARLY, 140, 0),  # the first exit, in the wake margin
        ((136, 30, 20), 0, Outcome.LATE, 150, 0),
        ((40, 30, 20), 85, Outcome.EARLY, 130, 0),
        ((40, 30, 20), 86, Outcome.EXPIRED, 85, -1),
        ((40, 30, 20), NEVER, Outcome.EXPIRED, 85, -1),
    ],
)
def test_whole_frames(real, drain_until, expected, at, head):
    run = simulate(make_policy(), (40, 30, 20), 150, real, drain_until=drain_until)
    assert (run.decision.outcome, run.at_ns, run.finished) == (expected, at, head)


DURATION = st.integers(0, 300)


@st.composite
def schedules(draw, lateness):
    segments = draw(st.lists(DURATION, min_size=1, max_size=8))
    real = [draw(DURATION | st.just(NEVER) | st.just(q)) for q in segments]
    return {
        "segments": segments,
        "look_ahead": draw(st.integers(0, 1)),
        "deadline_ns": draw(st.integers(-50, 1500)),
        "real": real,
        "pre": draw(st.integers(0, 100)),
        "drain_until": draw(st.sampled_from([0, 0, 0, NEVER]) | st.integers(0, 1500)),
        "lateness": draw(st.lists(lateness, min_size=1, max_size=5)),
    }


def run_schedule(schedule):
    policy = make_policy(schedule["segments"], schedule["look_ahead"])
    return simulate(policy, **{k: v for k, v in schedule.items() if k != "look_ahead"}), policy


def check_always(run, schedule):
    """What holds for every frame, however late the caller wakes."""
    deadline, segments = schedule["deadline_ns"], schedule["segments"]
    decision = run.decision
    for launched in run.launches:
        need = segments[launched.k] + (PRE if launched.k == 0 else 0)
        assert launched.predicted_start_ns + need + MARGIN <= deadline
    if decision.action is Action.PUBLISH:
        assert decision.segment == run.finished
        assert run.at_ns + POST + PUB <= deadline
        deepest = run.finished == len(segments) - 1
        in_flight = len(run.launches) - 1 > run.finished
        expected = Outcome.OVERRUN if in_flight else Outcome.OK if deepest else Outcome.EARLY
        assert decision.outcome is expected
    elif decision.outcome is Outcome.EXPIRED:
        assert not run.launches
    else:
        assert decision.outcome is Outcome.LATE
        assert run.launches
        assert run.at_ns >= deadline


@given(schedules(lateness=st.just(0)))
def test_random_schedules_with_exact_wake_ups(schedule):
    run, policy = run_schedule(schedule)
    check_always(run, schedule)
    deadline = schedule["deadline_ns"]
    outcome = run.decision.outcome
    if run.decision.action is Action.PUBLISH and run.finished > 0:
        assert run.at_ns <= deadline - MARGIN
    if outcome is Outcome.OVERRUN and run.finished > 0:
        assert run.at_ns == deadline - MARGIN
    if outcome is Outcome.LATE:
        assert run.at_ns == deadline
    if outcome is Outcome.EXPIRED:
        latest = policy.latest_start_ns(deadline)
        assert latest < 0 or schedule["drain_until"] > latest


@given(schedules(lateness=st.integers(0, WAKE)))
def test_late_wake_ups_within_the_margin_cost_no_answer_that_was_ready(schedule):
    run, _ = run_schedule(schedule)
    check_always(run, schedule)
    if run.decision.outcome is Outcome.LATE:
        first_end = run.launches[0].start_ns + schedule["real"][0] + schedule["pre"]
        assert first_end > schedule["deadline_ns"] - MARGIN


@given(schedules(lateness=st.integers(0, 2000)))
def test_any_wake_up_still_ends_the_frame_once(schedule):
    run, _ = run_schedule(schedule)
    check_always(run, schedule)
