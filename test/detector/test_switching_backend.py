"""Primary and fallback on a manual clock: who runs which frame, and what is said of it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.manual_backend import NEVER, ManualBackend

from perception_rt.core.circuit_breaker import BreakerState
from perception_rt.core.clock import NS_PER_MS, NS_PER_S, ManualClock
from perception_rt.core.errors import BackendError, UsageError
from perception_rt.core.frame import Outcome
from perception_rt.detector.backend import PREPROCESS
from perception_rt.detector.switching_backend import KEEP_WARM_NS, Role, SwitchingBackend

MS, S = NS_PER_MS, NS_PER_S
PERIOD = 33 * MS
BUDGET = 100 * MS
IMAGE = np.zeros((32, 32, 3), np.uint8)
PRIMARY, FALLBACK = Role


class Camera:
    """Frames each 33 ms; each one is run to its first exit, or given up at its deadline."""

    def __init__(self, reload=None):
        self.clock = ManualClock(1000 * MS)
        self.primary = ManualBackend(self.clock, (2, 2, 2), name=1)
        self.fallback = ManualBackend(self.clock, (20, 20, 20), name=2)
        self.backend = SwitchingBackend(
            self.primary, self.fallback, ("fast", "slow"), reload=reload
        )
        self.due_ns = self.clock.now()

    def frame(self):
        """The outcome of one frame and who ran it, 0 for nobody."""
        backend, clock = self.backend, self.clock
        self.due_ns = max(self.due_ns + PERIOD, clock.now())
        clock.advance_to(self.due_ns)
        deadline_ns = clock.now() + BUDGET
        backend.choose(clock.now(), BUDGET)
        runner = 0
        reason = ""
        if not backend.drain(clock.now() + PERIOD):
            outcome = Outcome.REPLACED
        else:
            outcome = Outcome.LATE
            try:
                before = self.primary.frames
                backend.begin(IMAGE)
                runner = 1 if self.primary.frames > before else 2
                backend.launch(0)
                while clock.now() < deadline_ns and not backend.ready(0):
                    backend.wait_until(deadline_ns)
                if clock.now() < deadline_ns:
                    outcome = Outcome.EARLY
                    assert backend.detections(0)[0, 0] == runner
                    assert backend.span_ns(0)[1] == clock.now()
            except BackendError as error:
                outcome, reason = Outcome.FAILED, str(error)
        backend.frame_ended(outcome, deadline_ns, clock.now(), reason)
        return outcome.name, runner

    def frames(self, count):
        return [self.frame() for _ in range(count)]

    def until_closed(self, most=400):
        """Frames until the primary is trusted again; their outcomes and who ran them."""
        seen = []
        while self.backend.degraded:
            seen.append(self.frame())
            assert len(seen) < most
        return seen


def test_the_primary_runs_while_it_is_well():
    camera = Camera()
    assert camera.frames(100) == [("EARLY", 1)] * 100
    assert (camera.backend.degraded, camera.backend.reason) == (False, "")
    assert (camera.backend.role, camera.backend.switches) == (PRIMARY, 0)


def test_two_faults_in_a_row_move_the_next_frame_to_the_fallback():
    camera = Camera()
    camera.frames(3)
    camera.primary.fault = "segment 0 failed: NaN"
    assert camera.frames(5) == [("FAILED", 1)] * 2 + [("EARLY", 2)] * 3
    backend = camera.backend
    assert backend.degraded
    assert backend.reason == "fast: 2 bad frames in a row, last: segment 0 failed: NaN"
    assert (backend.role, backend.switches) == (FALLBACK, 1)


def test_a_primary_that_misses_its_first_exit_is_left():
    camera = Camera()
    camera.primary.durations_ns[0] = 150 * MS
    seen = camera.frames(6)
    # the second frame waits for the first one's run, in vain for longer than a period
    assert [outcome for outcome, _ in seen[:2]] == ["LATE", "REPLACED"]
    assert seen[2:] == [("EARLY", 2)] * 4
    assert camera.backend.reason.endswith("last: still runs a frame beyond its deadline")


def test_a_primary_that_never_returns_is_not_waited_for():
    camera = Camera()
    camera.frames(2)
    camera.primary.durations_ns[0] = NEVER
    assert camera.frames(2) == [("LATE", 1), ("REPLACED", 0)]
    before_ns = camera.clock.now()
    assert camera.frame() == ("EARLY", 2)
    assert camera.clock.now() - before_ns < 2 * PERIOD


def test_a_deeper_segment_that_never_returns_is_noticed():
    """Its frame was answered by an earlier exit, and no later one can ever begin."""
    camera = Camera()
    assert camera.frame() == ("EARLY", 1)
    backend, clock = camera.backend, camera.clock
    camera.primary.durations_ns[1] = NEVER
    backend.launch(1)
    deadline_ns = clock.now() + BUDGET
    backend.frame_ended(Outcome.OVERRUN, deadline_ns, clock.now())
    seen = camera.frames(8)
    waited = seen.index(("EARLY", 2))
    assert seen[:waited] == [("REPLACED", 0)] * waited
    assert waited * PERIOD <= BUDGET + 3 * PERIOD


def test_a_camera_faster_than_the_backend_is_no_fault_of_it():
    camera = Camera()
    backend, clock = camera.backend, camera.clock
    for _ in range(50):
        assert camera.frame() == ("EARLY", 1)
        for _ in range(5):
            backend.choose(clock.now(), BUDGET)
            backend.frame_ended(Outcome.REPLACED, clock.now() + BUDGET, clock.now())
    assert not backend.degraded


def test_frames_that_come_too_late_are_no_fault_of_it():
    camera = Camera()
    camera.frame()
    for _ in range(50):
        camera.clock.advance(PERIOD)
        now_ns = camera.clock.now()
        camera.backend.choose(now_ns, BUDGET)
        camera.backend.frame_ended(Outcome.EXPIRED, now_ns - MS, now_ns)
    assert not camera.backend.degraded


def test_it_comes_back_without_a_single_miss_after_rehearsals():
    camera = Camera()
    camera.primary.fault = "NaN"
    camera.frames(2)
    camera.primary.fault = ""
    opened_ns = camera.clock.now()
    begun = camera.primary.frames
    seen = camera.until_closed()
    assert {outcome for outcome, _ in seen} == {"EARLY"}
    by_fallback = [runner for _, runner in seen].count(2)
    assert [runner for _, runner in seen] == [2] * by_fallback + [1] * 10
    assert by_fallback * PERIOD >= S
    assert camera.clock.now() - opened_ns < 3 * S
    assert camera.primary.frames - begun == 3 + 10
    assert (camera.backend.role, camera.backend.switches, camera.backend.reason) == (
        PRIMARY,
        2,
        "",
    )


def test_one_that_still_fails_is_given_no_frame():
    camera = Camera()
    camera.primary.fault = "NaN"
    camera.frames(2)
    assert camera.frames(600) == [("EARLY", 2)] * 600
    # probes after 1, 3, 7, 15 s, one rehearsal each
    assert camera.primary.frames == 2 + 4
    assert camera.backend.degraded


def test_one_that_is_still_too_slow_is_given_no_frame():
    camera = Camera()
    camera.primary.durations_ns = [150 * MS] * 3
    camera.frames(2)
    assert camera.frames(100) == [("EARLY", 2)] * 100
    camera.primary.durations_ns = [2 * MS] * 3
    assert {outcome for outcome, _ in camera.until_closed()} == {"EARLY"}


def test_one_that_fails_on_trial_is_left_at_once():
    camera = Camera()
    camera.primary.fault = "NaN"
    camera.frames(2)
    camera.primary.fault = ""
    assert camera.frame() == ("EARLY", 2)
    while camera.backend.role == FALLBACK:
        camera.frame()
    assert camera.backend.degraded
    camera.primary.fault = "NaN again"
    assert camera.frames(3) == [("FAILED", 1), ("EARLY", 2), ("EARLY", 2)]
    assert camera.backend.reason == "fast: frame 2 on trial: NaN again"


def test_a_hung_primary_is_proved_once_it_has_returned():
    camera = Camera()
    camera.primary.durations_ns[0] = NEVER
    camera.frames(2)
    assert camera.frames(100) == [("EARLY", 2)] * 100
    assert camera.primary.frames == 1
    camera.primary.durations_ns[0] = 2 * MS
    camera.primary.free()
    assert {outcome for outcome, _ in camera.until_closed()} == {"EARLY"}


def test_a_rehearsal_that_hangs_counts_as_failed():
    camera = Camera()
    camera.primary.fault = "NaN"
    camera.frames(2)
    camera.primary.fault = ""
    camera.primary.durations_ns[2] = NEVER
    assert camera.frames(300) == [("EARLY", 2)] * 300
    assert camera.backend.degraded


def test_the_fallback_is_kept_warm_and_its_fault_is_known_before_it_is_needed():
    camera = Camera()
    count = 2 * KEEP_WARM_NS // PERIOD + 2
    assert camera.frames(count) == [("EARLY", 1)] * count
    assert camera.fallback.frames == 1
    camera.fallback.fault = "out of memory"
    assert camera.frames(count) == [("EARLY", 1)] * count
    backend = camera.backend
    assert (backend.degraded, backend.reason) == (False, "fallback slow: out of memory")
    camera.fallback.fault = ""
    camera.frames(count)
    assert backend.reason == ""


def test_a_frame_waits_for_a_rehearsal_of_the_fallback_that_is_under_way():
    camera = Camera()
    while camera.fallback.frames == 0:
        camera.frame()
    camera.primary.dead = True
    assert camera.frames(2) == [("FAILED", 0), ("EARLY", 2)]


def test_a_dead_primary_is_left_at_the_first_fault_and_stays_away():
    camera = Camera()
    camera.primary.dead = True
    assert camera.frame() == ("FAILED", 0)
    assert camera.frames(200) == [("EARLY", 2)] * 200
    assert camera.backend.reason == "fast: the device is lost"


def test_a_dead_primary_is_loaded_again_beside_the_frames():
    fresh = threading.Event()
    made: list[ManualBackend] = []

    def reload() -> ManualBackend:
        fresh.wait(30)
        return made[0]

    camera = Camera(reload)
    made.append(ManualBackend(camera.clock, (2, 2, 2), name=1))
    old = camera.primary
    camera.frame()
    old.dead = True
    assert camera.frames(60) == [("FAILED", 0)] + [("EARLY", 2)] * 59
    assert camera.backend._reloader is not None
    before = camera.backend.progress
    camera.primary = made[0]
    fresh.set()
    camera.backend._reloader.join()
    assert {outcome for outcome, _ in camera.until_closed()} == {"EARLY"}
    assert old.closed
    assert camera.frame() == ("EARLY", 1)
    assert camera.backend.progress > before


def test_one_that_cannot_be_loaded_again_is_tried_later():
    tries = []

    def reload():
        tries.append(1)
        raise RuntimeError("no device")

    camera = Camera(reload)
    camera.primary.dead = True
    camera.frame()
    for _ in range(400):
        assert camera.frame() == ("EARLY", 2)
        if camera.backend._reloader is not None:
            camera.backend._reloader.join()
    assert len(tries) == 3  # after 1, 3 and 7 s of 13
    assert camera.backend._breaker.state == BreakerState.OPEN


def test_the_answer_of_an_abandoned_run_is_never_shown():
    camera = Camera()
    camera.primary.durations_ns[0] = 150 * MS
    camera.frames(2)
    camera.primary.free()
    camera.backend.choose(camera.clock.now(), BUDGET)
    camera.backend.begin(IMAGE)
    assert not camera.backend.ready(0)
    assert camera.backend.span_ns(0) == (0, 0)
    assert camera.backend.span_ns(PREPROCESS)[1] == 0


def test_different_models_are_refused():
    clock = ManualClock(0)
    with pytest.raises(UsageError, match="fast has 3 exit heads, slow has 2"):
        SwitchingBackend(ManualBackend(clock), ManualBackend(clock, (1, 1)), ("fast", "slow"))


@pytest.mark.parametrize(("primary", "fallback"), [(True, False), (False, True)])
def test_close_stops_both_and_says_when_one_does_not(primary, fallback):
    camera = Camera()
    camera.primary.stops, camera.fallback.stops = primary, fallback
    assert not camera.backend.close(0.0)
    assert camera.primary.closed
    assert camera.fallback.closed


def test_what_the_policy_may_do_is_what_the_chosen_backend_can():
    camera = Camera()
    camera.primary.look_ahead, camera.primary.double_buffered = 1, True
    assert (camera.backend.look_ahead, camera.backend.double_buffered) == (1, True)
    camera.primary.fault = "NaN"
    camera.frames(3)
    assert (camera.backend.look_ahead, camera.backend.double_buffered) == (0, False)
