"""Scripted traces of the supervision, one for each case from the field."""

from __future__ import annotations

from typing import Any

import pytest

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.errors import UsageError
from perception_rt.core.supervision import (
    Cause,
    FrameFacts,
    HeartbeatFacts,
    SourceState,
    State,
    SupervisionConfig,
    Supervisor,
    WorkerState,
)

MS = NS_PER_MS
CYCLE = 20 * MS
BUDGET = 100 * MS
OK, EARLY, OVERRUN, LATE, EXPIRED, REPLACED, FAILED = range(7)


class Scene:
    """A worker and a supervisor on one clock that starts at 10 s; every step is one cycle."""

    def __init__(self, **limits):
        self.supervisor = Supervisor(SupervisionConfig(**limits))
        self.now = 10_000 * MS
        self.worker: dict[str, Any] = {
            "session_id": 7,
            "node_session_id": 3,
            "activation_count": 1,
            "state": WorkerState.ACTIVE,
            "sequence": 0,
            "capture_count": 0,
            "deadline_count": 0,
            "inference_count": 0,
            "source_state": SourceState.OK,
            "degraded": False,
        }
        self.frame_id = 0
        self.epoch = 0
        self.stuck = ()

    def beat(self, **changes):
        worker = self.worker
        worker.update(changes)
        worker["sequence"] += 1
        for name in ("capture_count", "deadline_count", "inference_count"):
            worker[name] += name not in self.stuck
        self.supervisor.on_heartbeat(self.now, HeartbeatFacts(**worker))

    def frame(self, outcome=OK, **changes):
        self.frame_id += 1
        met = outcome <= OVERRUN
        facts = {
            "session_id": self.worker["session_id"],
            "frame_id": self.frame_id,
            "epoch": self.epoch,
            "outcome": outcome,
            "exit_head": 1 if met else -1,
            "deadline_ns": self.now + BUDGET,
            "left_ns": self.now if met else 0,
            "capture_stamp_ns": self.now - 10 * MS,
            "frame_skip": False,
        }
        facts.update(changes)
        self.frame_id = facts["frame_id"]
        self.supervisor.on_frame(self.now, FrameFacts(**facts))

    def cycle(self, lateness_ns=0):
        self.now += CYCLE
        return self.supervisor.cycle(self.now, lateness_ns)

    def step(self, outcome=OK, **beat):
        """One ordinary period: a heartbeat, a frame, a judgement."""
        self.beat(**beat)
        self.frame(outcome)
        return self.cycle()

    def running(self, steps=3):
        for _ in range(steps):
            result = self.step()
        assert (result.state, result.permit, result.causes) == (State.OK, True, 0)
        return self

    def reset(self):
        """An explicit deactivate and activate."""
        self.beat(state=WorkerState.INACTIVE)
        assert self.cycle().state == State.DEACTIVATED
        self.beat(state=WorkerState.ACTIVE, activation_count=self.worker["activation_count"] + 1)
        assert self.cycle().state == State.OK


# Start


def test_before_any_contact_it_is_deactivated_and_gives_no_permit():
    result = Scene().cycle()
    assert (result.state, result.causes, result.permit) == (State.DEACTIVATED, 0, False)
    assert (result.heartbeat_age_ns, result.last_met_age_ns, result.worker_session_id) == (
        -1,
        -1,
        0,
    )


@pytest.mark.parametrize(
    "state", [WorkerState.STARTING, WorkerState.INACTIVE, WorkerState.STOPPING]
)
def test_a_worker_that_is_not_active_leaves_it_deactivated(state):
    scene = Scene()
    for _ in range(10):
        scene.beat(state=state)
        assert scene.cycle().state == State.DEACTIVATED
    for _ in range(10):  # and its silence is nobody's fault
        assert scene.cycle().state == State.DEACTIVATED


def test_no_error_before_the_first_frame_within_grace_and_not_received_after():
    scene = Scene(grace_ns=200 * MS)
    scene.beat()
    states = []
    for _ in range(14):
        result = scene.cycle()
        states.append(result.state)
        scene.beat()
        assert not result.permit
    assert states == [State.OK] * 10 + [State.FAILED] * 2 + [State.EXPIRED] * 2
    assert result.causes == Cause.NOT_RECEIVED
    assert result.reason == "no frame since activation"


def test_no_permit_before_the_first_met_frame_of_an_activation():
    scene = Scene()
    result = scene.step(LATE)
    assert (result.state, result.permit, result.reason) == (State.OK, False, "no frame met yet")
    result = scene.step(OK)
    assert (result.state, result.permit, result.reason) == (State.OK, True, "")
    scene.reset()
    assert not scene.cycle().permit


# Alive


def test_three_lost_heartbeats_go_straight_to_expired():
    scene = Scene().running()
    results = []
    for _ in range(3):
        scene.frame()
        results.append(scene.cycle())
    assert [r.state for r in results] == [State.FAILED, State.EXPIRED, State.EXPIRED]
    assert results[1].causes == Cause.ALIVE
    assert results[1].heartbeat_age_ns == 60 * MS
    assert results[1].reason == "no heartbeat for 60 ms"
    assert [r.permit for r in results] == [True, False, False]


def test_one_lost_heartbeat_is_tolerated_and_forgotten():
    scene = Scene().running()
    scene.frame()
    result = scene.cycle()
    assert (result.state, result.causes, result.permit) == (State.FAILED, Cause.ALIVE, True)
    assert scene.step().state == State.OK


@pytest.mark.parametrize(
    ("stuck", "thread"), [("deadline_count", "deadline"), ("capture_count", "capture")]
)
def test_a_thread_that_stands_still_over_five_beats_is_an_alive_fault(stuck, thread):
    scene = Scene().running()
    scene.stuck = (stuck,)
    results = [scene.step() for _ in range(7)]
    assert [r.state for r in results] == [State.OK] * 4 + [State.FAILED] * 2 + [State.EXPIRED]
    assert results[-1].causes == Cause.ALIVE
    assert results[-1].reason == f"the {thread} thread stands still"


def test_a_long_segment_is_no_alive_fault():
    scene = Scene().running()
    scene.stuck = ("inference_count",)
    assert {scene.step().state for _ in range(20)} == {State.OK}


def test_a_repeated_heartbeat_is_no_sign_of_life():
    scene = Scene().running()
    beat = HeartbeatFacts(**scene.worker)
    results = []
    for _ in range(3):
        scene.supervisor.on_heartbeat(scene.now, beat)
        scene.frame()
        results.append(scene.cycle())
    assert [r.state for r in results] == [State.FAILED, State.EXPIRED, State.EXPIRED]
    assert results[0].causes == Cause.ALIVE | Cause.LOGICAL
    assert results[1].causes == Cause.ALIVE


# Deadline


def test_more_than_two_misses_of_twenty_fail_and_more_than_four_expire():
    scene = Scene().running()
    states = []
    for outcome in (LATE, OK) * 5:
        result = scene.step(outcome)
        states.append((result.state, result.window_misses))
    assert states == [
        (State.OK, 1), (State.OK, 1), (State.OK, 2), (State.OK, 2),
        (State.FAILED, 3), (State.FAILED, 3), (State.FAILED, 4), (State.FAILED, 4),
        (State.EXPIRED, 5), (State.EXPIRED, 5),
    ]  # fmt: skip
    assert result.causes == Cause.DEADLINE
    assert (result.permit, result.window_length) == (False, 13)


def test_the_window_forgets_after_twenty_frames():
    scene = Scene().running()
    for outcome in (LATE, OK, LATE, OK, LATE):
        result = scene.step(outcome)
    assert (result.state, result.window_misses) == (State.FAILED, 3)
    states = [scene.step().state for _ in range(16)]
    assert states == [State.FAILED] * 15 + [State.OK]


@pytest.mark.parametrize("outcome", [LATE, EXPIRED, REPLACED, FAILED])
def test_three_misses_in_a_row_expire_even_within_one_cycle(outcome):
    scene = Scene().running()
    scene.beat()
    for _ in range(3):
        scene.frame(outcome)
    scene.frame(OK)
    result = scene.cycle()
    assert (result.state, result.causes, result.permit) == (State.EXPIRED, Cause.DEADLINE, False)
    assert result.reason == "3 misses in a row, up to frame 6"


@pytest.mark.parametrize("outcome", [OK, EARLY, OVERRUN])
def test_every_met_outcome_keeps_it_ok(outcome):
    scene = Scene()
    assert {scene.step(outcome).state for _ in range(30)} == {State.OK}


def test_skipped_by_wish_is_no_miss_but_a_sign_of_life():
    scene = Scene().running()
    for _ in range(30):
        scene.beat()
        scene.frame(REPLACED, frame_skip=True)
        result = scene.cycle()
        assert (result.state, result.window_misses) == (State.OK, 0)
    scene.beat()
    scene.frame(LATE, frame_skip=True)
    assert scene.cycle().window_misses == 1


def test_a_frame_called_met_that_left_late_is_a_miss():
    scene = Scene().running()
    scene.beat()
    scene.frame(OK, deadline_ns=scene.now - MS)
    result = scene.cycle()
    assert (result.state, result.causes) == (State.FAILED, Cause.DEADLINE)
    assert (result.window_misses, result.consecutive_misses) == (1, 1)


# Logical and data


@pytest.mark.parametrize("changes", [{"exit_head": -1}, {"left_ns": 0}])
def test_a_frame_called_met_without_an_answer_is_a_logical_fault(changes):
    scene = Scene().running()
    scene.beat()
    scene.frame(OK, **changes)
    result = scene.cycle()
    assert (result.state, result.causes, result.window_misses) == (State.FAILED, Cause.LOGICAL, 1)


def test_a_frame_reported_twice_is_a_logical_fault_and_counts_once():
    scene = Scene().running()
    scene.beat()
    scene.frame(LATE)
    scene.frame(LATE, frame_id=scene.frame_id)
    result = scene.cycle()
    assert (result.state, result.causes, result.window_misses) == (State.FAILED, Cause.LOGICAL, 1)


def test_a_lost_frame_timing_is_a_data_fault_after_its_deadline_and_no_miss():
    scene = Scene().running()
    scene.frame_id += 2  # frames 4 and 5 are never heard of; 6 reveals it, due 100 ms later
    results = [scene.step() for _ in range(10)]
    # revealed at 10,060 ms: lost at 10,060 + 100 + 60 = 10,220 ms, the eighth of these cycles
    assert [r.state for r in results] == [State.OK] * 7 + [State.FAILED, State.OK, State.OK]
    assert results[7].causes == Cause.DATA
    assert (results[-1].lost_frames, results[-1].window_misses) == (2, 0)


def test_a_replaced_frame_reported_before_an_older_one_is_no_gap():
    scene = Scene().running()
    for _ in range(20):
        scene.beat()
        first = scene.frame_id
        scene.frame(REPLACED, frame_id=first + 2, frame_skip=True)
        scene.frame(OK, frame_id=first + 1)
        scene.frame_id = first + 2
        result = scene.cycle()
        assert (result.state, result.lost_frames) == (State.OK, 0)


def test_a_huge_gap_is_a_data_fault_at_once():
    scene = Scene().running()
    scene.beat()
    scene.frame(frame_id=10_000)
    result = scene.cycle()
    assert (result.state, result.causes, result.lost_frames) == (State.FAILED, Cause.DATA, 9996)


def test_the_first_frames_seen_of_a_session_are_no_gap():
    scene = Scene()
    scene.frame_id = 500
    scene.running(20)
    assert scene.cycle().lost_frames == 0


def test_silence_of_frames_is_a_data_fault():
    scene = Scene().running()
    results = []
    for _ in range(16):
        scene.beat()
        results.append(scene.cycle())
    # the last frame came at 10,040 ms; 250 ms are allowed
    assert [r.state for r in results] == [State.OK] * 11 + [State.FAILED] * 2 + [State.EXPIRED] * 3
    assert results[11].reason == "no frame for 260 ms"
    assert results[-1].causes == Cause.DATA


def test_a_slow_camera_is_no_fault():
    scene = Scene(frame_period_ns=1000 * MS)
    for i in range(200):
        scene.beat()
        if i % 50 == 0:
            scene.frame()
        assert scene.cycle().state == State.OK


def test_a_lost_source_is_named_while_the_worker_lives():
    scene = Scene().running()
    results = [scene.step(source_state=SourceState.LOST) for _ in range(3)]
    assert [r.state for r in results] == [State.FAILED, State.FAILED, State.EXPIRED]
    assert results[-1].causes == Cause.DATA
    assert results[-1].reason == "the source is lost"


def test_a_shallow_exit_head_below_the_allowed_one_is_a_data_fault():
    scene = Scene(min_exit_head=1).running()
    scene.beat()
    scene.frame(EARLY, exit_head=0)
    result = scene.cycle()
    assert (result.state, result.causes, result.window_misses) == (State.FAILED, Cause.DATA, 0)


def test_a_report_long_after_the_deadline_is_stale():
    scene = Scene().running()
    scene.beat()
    old = scene.now - 200 * MS
    scene.frame(OK, capture_stamp_ns=old, left_ns=old + MS, deadline_ns=old + BUDGET)
    result = scene.cycle()
    assert (result.state, result.causes) == (State.FAILED, Cause.DATA)
    assert result.last_met_age_ns == 50 * MS  # the newest met frame, not the last reported


def test_a_looped_bag_is_an_event_and_no_error():
    scene = Scene().running()
    for epoch in (1, 2, 3):
        scene.epoch = epoch
        result = scene.step()
        assert (result.state, result.epoch_changes, result.window_misses) == (State.OK, epoch, 0)


def test_zero_elapsed_time_is_no_error():
    scene = Scene().running()
    first = scene.supervisor.cycle(scene.now, 0)
    assert scene.supervisor.cycle(scene.now, 0) == first
    assert first.state == State.OK


# Debounce


def test_faults_are_debounced_and_leak_away():
    scene = Scene().running()

    def bad():
        scene.beat()
        scene.frame(OK, frame_id=scene.frame_id)  # reported again
        return scene.cycle().state

    def good():
        return scene.step().state

    assert [bad(), bad(), good(), good()] == [State.FAILED] * 3 + [State.OK]
    assert [bad(), good(), bad(), bad(), good()] == [State.FAILED, State.OK] + [State.FAILED] * 3
    assert [bad(), bad()] == [State.FAILED, State.EXPIRED]


def test_tolerance_zero_expires_at_the_first_fault():
    scene = Scene(tolerance=0).running()
    scene.beat()
    scene.frame(OK, frame_id=scene.frame_id)
    assert scene.cycle().state == State.EXPIRED


# Latch and reset


def expired():
    scene = Scene().running()
    for _ in range(3):
        scene.cycle()
    return scene


def test_expired_is_held_however_well_it_goes():
    scene = expired()
    for _ in range(100):
        result = scene.step()
        assert (result.state, result.causes, result.permit) == (State.EXPIRED, Cause.ALIVE, False)


def test_expired_keeps_what_led_to_it():
    scene = expired()
    for _ in range(3):
        result = scene.step(LATE, source_state=SourceState.LOST)
    assert (result.causes, result.reason) == (Cause.ALIVE, "no heartbeat for 60 ms")
    assert result.consecutive_misses == 3


def test_deactivate_and_activate_resets_with_a_new_grace():
    scene = expired()
    for _ in range(3):
        scene.step(LATE)
    scene.reset()
    for _ in range(20):
        scene.beat()
        result = scene.cycle()
    assert (result.state, result.window_length, result.consecutive_misses) == (State.OK, 0, 0)
    assert scene.step().permit


def test_a_quick_reset_between_two_heartbeats_counts():
    scene = expired()
    assert scene.step(activation_count=2).state == State.OK


def test_a_deactivated_worker_that_turns_active_without_an_activation_stays_without_permit():
    scene = expired()
    scene.beat(state=WorkerState.INACTIVE)
    scene.cycle()
    for _ in range(5):
        result = scene.step(state=WorkerState.ACTIVE)
        assert (result.state, result.permit) == (State.DEACTIVATED, False)


def restart(scene, **changes):
    scene.worker.update(session_id=scene.worker["session_id"] + 1, sequence=0, **changes)
    scene.worker.update(capture_count=0, deadline_count=0, inference_count=0)
    scene.frame_id = scene.epoch = 0


def test_a_restarted_worker_stays_expired_until_reset():
    scene = expired()
    restart(scene)
    for state in (WorkerState.STARTING, WorkerState.INACTIVE):
        scene.beat(state=state)
        assert scene.cycle().state == State.EXPIRED
    for _ in range(10):
        assert scene.step(state=WorkerState.ACTIVE).state == State.EXPIRED
    scene.reset()


@pytest.mark.parametrize("heard_inactive", [True, False])
def test_a_reset_counts_though_no_worker_was_there_to_be_deactivated(heard_inactive):
    scene = expired()
    restart(scene, activation_count=2)
    if heard_inactive:
        scene.beat(state=WorkerState.INACTIVE)
        assert scene.cycle().state == State.EXPIRED
    result = scene.step(state=WorkerState.ACTIVE)
    assert (result.state, result.causes, result.permit) == (State.OK, 0, True)


def test_a_reset_of_another_node_does_not_count():
    scene = expired()
    restart(scene, node_session_id=4, activation_count=2)
    assert scene.step().state == State.EXPIRED


def test_a_restarted_node_that_activates_itself_stays_expired_until_reset():
    scene = expired()
    restart(scene, node_session_id=4)
    for _ in range(10):
        assert scene.step().state == State.EXPIRED
    scene.reset()


def test_a_worker_replaced_while_ok_expires():
    scene = Scene().running()
    restart(scene)
    result = scene.step()
    assert (result.state, result.causes, result.worker_session_id) == (
        State.EXPIRED,
        Cause.ALIVE,
        8,
    )


def test_a_node_restarted_while_deactivated_needs_a_reset():
    scene = Scene().running()
    scene.beat(state=WorkerState.INACTIVE)
    scene.cycle()
    restart(scene, node_session_id=4, state=WorkerState.ACTIVE)
    assert scene.step().state == State.EXPIRED
    scene.reset()


def test_cleanup_and_configure_in_one_node_is_no_fault():
    scene = Scene().running()
    scene.beat(state=WorkerState.INACTIVE)
    scene.beat(state=WorkerState.STOPPING)
    assert scene.cycle().state == State.DEACTIVATED
    restart(scene, activation_count=2)
    for state in (WorkerState.STARTING, WorkerState.INACTIVE):
        scene.beat(state=state)
        assert scene.cycle().state == State.DEACTIVATED
    assert scene.step(state=WorkerState.ACTIVE).permit


@pytest.mark.parametrize("state", [WorkerState.INACTIVE, WorkerState.STOPPING])
def test_leaving_in_order_is_no_fault(state):
    scene = Scene().running()
    scene.beat(state=state)
    for _ in range(10):
        result = scene.cycle()
        assert (result.state, result.causes, result.permit) == (State.DEACTIVATED, 0, False)


def test_stopping_does_not_reset():
    scene = expired()
    scene.beat(state=WorkerState.STOPPING)
    assert scene.cycle().state == State.EXPIRED


def test_an_active_worker_that_says_it_is_starting_expires():
    scene = Scene().running()
    scene.beat(state=WorkerState.STARTING)
    result = scene.cycle()
    assert (result.state, result.causes) == (State.EXPIRED, Cause.LOGICAL)


# Own lateness


def test_own_lag_is_named_and_nobody_else_is_blamed():
    scene = Scene().running()
    scene.now += 1980 * MS  # stopped for 2 s, nothing received meanwhile
    result = scene.cycle(lateness_ns=1980 * MS)
    assert (result.state, result.causes, result.permit) == (State.SELF_LAG, Cause.SELF_LAG, False)
    assert result.skipped_cycles == 99
    assert result.heartbeat_age_ns == 2020 * MS
    result = scene.step()
    assert (result.state, result.causes, result.permit) == (State.OK, 0, True)


def test_nothing_stale_is_trusted_after_own_lag():
    scene = Scene().running()
    scene.now += 200 * MS
    assert scene.cycle(lateness_ns=200 * MS).state == State.SELF_LAG
    results = [scene.cycle() for _ in range(3)]
    assert [r.state for r in results] == [State.SELF_LAG, State.SELF_LAG, State.EXPIRED]
    assert [r.permit for r in results] == [False] * 3
    assert results[-1].causes == Cause.ALIVE


def test_misses_received_after_own_lag_are_counted():
    scene = Scene().running()
    scene.now += 200 * MS
    scene.beat()
    scene.frame(LATE)
    scene.frame(LATE)
    result = scene.cycle(lateness_ns=200 * MS)
    assert (result.state, result.window_misses, result.consecutive_misses) == (
        State.SELF_LAG,
        2,
        2,
    )
    assert scene.step(LATE).state == State.EXPIRED


def test_frames_lost_by_own_lag_are_counted_and_not_blamed():
    scene = Scene().running()
    scene.now += 400 * MS
    scene.frame_id += 12
    scene.beat()
    scene.frame()
    assert scene.cycle(lateness_ns=400 * MS).state == State.SELF_LAG
    results = [scene.step() for _ in range(20)]
    assert {r.state for r in results} == {State.OK}
    assert results[-1].lost_frames == 12


def test_a_frame_reported_after_own_lag_that_gave_it_up_is_no_fault():
    scene = Scene().running()
    scene.beat()
    scene.frame(frame_id=5)
    scene.now += 200 * MS
    assert scene.cycle(lateness_ns=200 * MS).state == State.SELF_LAG
    scene.beat()
    scene.frame(frame_id=4)
    assert scene.cycle().state == State.OK


def test_silence_is_counted_from_the_end_of_own_lag():
    scene = Scene().running()
    scene.now += 400 * MS
    assert scene.cycle(lateness_ns=400 * MS).state == State.SELF_LAG
    states = []
    for _ in range(13):
        scene.beat()
        states.append(scene.cycle().state)
    assert states == [State.OK] * 12 + [State.FAILED]


def test_grace_is_counted_from_the_end_of_own_lag():
    scene = Scene(grace_ns=100 * MS)
    scene.beat()
    scene.now += 400 * MS
    assert scene.cycle(lateness_ns=400 * MS).state == State.SELF_LAG
    states = []
    for _ in range(6):
        scene.beat()
        states.append(scene.cycle().state)
    assert states == [State.OK] * 5 + [State.FAILED]


@pytest.mark.parametrize(
    ("lateness", "state"), [(40 * MS, State.OK), (40 * MS + 1, State.SELF_LAG)]
)
def test_two_cycles_of_lateness_are_allowed(lateness, state):
    scene = Scene().running()
    scene.beat()
    scene.frame()
    assert scene.cycle(lateness_ns=lateness).state == state


def test_own_lag_leaves_expired_and_deactivated_as_they_are():
    scene = expired()
    result = scene.cycle(lateness_ns=100 * MS)
    assert (result.state, result.causes) == (State.EXPIRED, Cause.ALIVE | Cause.SELF_LAG)
    result = Scene().cycle(lateness_ns=100 * MS)
    assert (result.state, result.causes) == (State.DEACTIVATED, Cause.SELF_LAG)


# Values that cannot be


@pytest.mark.parametrize(
    "changes",
    [
        {"session_id": 0}, {"session_id": -1}, {"node_session_id": -1}, {"activation_count": -1},
        {"state": 4}, {"state": -1}, {"source_state": 3}, {"capture_count": -5},
        {"deadline_count": 0}, {"node_session_id": 9}, {"activation_count": 0},
    ],
)  # fmt: skip
def test_a_corrupt_heartbeat_expires(changes):
    scene = Scene().running()
    scene.beat(**changes)
    result = scene.cycle()
    assert (result.state, result.causes, result.permit) == (State.EXPIRED, Cause.DATA, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"session_id": 0}, {"frame_id": 0}, {"epoch": -1}, {"outcome": 7}, {"outcome": -1},
        {"exit_head": 8}, {"exit_head": -2}, {"left_ns": -1}, {"deadline_ns": 0},
    ],
)  # fmt: skip
def test_a_corrupt_frame_timing_expires(changes):
    scene = Scene().running()
    scene.frame(**changes)
    result = scene.cycle()
    assert (result.state, result.causes, result.permit) == (State.EXPIRED, Cause.DATA, False)


def test_frames_of_another_worker_are_ignored():
    scene = Scene().running()
    scene.beat()
    for i in range(3):
        scene.frame(LATE, session_id=99, frame_id=i + 1)
    result = scene.cycle()
    assert (result.state, result.window_misses, result.last_frame_id) == (State.OK, 0, 3)


# Limits


@pytest.mark.parametrize(
    "limits",
    [
        {"cycle_ns": 0},
        {"cycle_ns": 40 * MS, "heartbeat_period_ns": 20 * MS},
        {"lost_heartbeats": 1},
        {"tolerance": -1},
        {"window_length": 65},
        {"window_length": 4},
        {"window_failed": 5},
        {"consecutive_expired": 0},
        {"self_lag_cycles": 0},
    ],
)
def test_limits_that_cannot_be_met_are_refused(limits):
    with pytest.raises(UsageError, match="supervision: "):
        SupervisionConfig(**limits)


def test_allowed_silence_follows_the_camera():
    assert SupervisionConfig().frame_silence_ns == 250 * MS
    assert SupervisionConfig(frame_period_ns=200 * MS).frame_silence_ns == 600 * MS


# Fallback backend


def test_a_degraded_detector_keeps_its_permit_and_is_reported():
    scene = Scene().running()
    result = scene.step(degraded=True)
    assert (result.state, result.permit, result.causes) == (State.OK, True, Cause.DEGRADED)
    assert result.reason == "the detector runs on its fallback backend"
    for _ in range(200):
        result = scene.step()
    assert (result.state, result.permit, result.causes) == (State.OK, True, Cause.DEGRADED)
    result = scene.step(degraded=False)
    assert (result.state, result.permit, result.causes, result.reason) == (State.OK, True, 0, "")


def test_degraded_stands_beside_a_fault_and_hides_no_reason():
    scene = Scene().running()
    for outcome in (LATE, OK, LATE, OK, LATE):
        result = scene.step(outcome, degraded=True)
    assert result.state == State.FAILED
    assert result.permit
    assert result.causes == Cause.DEADLINE | Cause.DEGRADED
    assert result.reason.startswith("3 misses in ")


def test_degraded_saves_nobody_from_expiry():
    scene = Scene().running()
    for _ in range(3):
        result = scene.step(LATE, degraded=True)
    assert (result.state, result.permit) == (State.EXPIRED, False)
    assert result.causes == Cause.DEADLINE
