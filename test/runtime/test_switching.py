"""The deadline loop over a primary and a fallback, on a manual clock."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.manual_backend import NEVER, ManualBackend

from perception_rt.capture.slot import NewestSlot
from perception_rt.core.clock import NS_PER_MS, ManualClock
from perception_rt.core.exit_policy import ExitPolicy
from perception_rt.core.frame import Outcome, Stage
from perception_rt.core.latency_model import LatencyModel
from perception_rt.detector.postprocess import Postprocessor
from perception_rt.detector.switching_backend import SwitchingBackend
from perception_rt.runtime.pipeline import DeadlineLoop
from perception_rt.runtime.publisher import Heartbeat, NullPublisher
from perception_rt.runtime.shared_state import SharedState, WorkerState

MS = NS_PER_MS
EXITS = 3
FAST, SLOW = (2, 3, 4), (20, 60, 90)


class Postprocess(Postprocessor):
    def __init__(self):
        self.heads = []

    def run(self, tensor, letterbox, confidence, nms, max_det, out):
        self.heads.append(int(tensor[0, 0]))
        return 0


class Publisher(NullPublisher):
    def __init__(self):
        self.records = []
        self.degraded = []

    def timing(self, record, totals):
        self.records.append((record.frame_id, Outcome(record.outcome).name, record.exit_head))

    def heartbeat(self, beat):
        self.degraded.append(beat.degraded)


class Rig:
    def __init__(self, slow=SLOW):
        self.clock = ManualClock(1_000 * MS)
        self.state = SharedState.create()
        self.state.budget_ns = 100 * MS
        self.state.max_det = 10
        self.primary = ManualBackend(self.clock, FAST, name=1)
        self.fallback = ManualBackend(self.clock, slow, name=2)
        self.backend = SwitchingBackend(self.primary, self.fallback, ("gpu", "cpu"))
        self.slot = NewestSlot(5)
        self.models = [self.model(FAST), self.model(slow)]
        self.policies = [ExitPolicy(EXITS, model, wake_margin_ns=MS) for model in self.models]
        self.postprocess = Postprocess()
        self.publisher = Publisher()
        self.loop = DeadlineLoop(
            self.backend, self.slot, deque(), self.models[0], self.policies[0], self.postprocess,
            self.publisher, self.state, Heartbeat(7, 8), 10, None, self.clock,
            (self.models[1], self.policies[1]),
        )  # fmt: skip
        self.state.worker_state = WorkerState.ACTIVE
        self.next_id = 0

    @staticmethod
    def model(durations_ms):
        model = LatencyModel(EXITS)
        for stage in (Stage.PREPROCESS, Stage.POSTPROCESS, Stage.PUBLISH):
            model.prior(stage, [MS])
        for k, ms in enumerate(durations_ms):
            model.prior(Stage.SEGMENT_0 + k, [ms * MS])
        return model

    def frame(self):
        """Deliver a frame 33 ms after the one before, or now, and take it to its outcome."""
        self.next_id += 1
        self.clock.advance_to(max(self.clock.now(), (1_000 + 33 * self.next_id) * MS))
        buffer = self.slot.writable()
        buffer.reserve(24, 32)
        buffer.frame_id = self.next_id
        buffer.capture_stamp_ns = self.clock.now()
        buffer.capture_start_ns = buffer.capture_end_ns = buffer.capture_stamp_ns
        self.slot.put(buffer)
        assert self.loop.step()
        return self.publisher.records[-1][1:]

    def frames(self, count):
        return [self.frame() for _ in range(count)]


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.state.close()


def test_the_fallback_answers_from_the_exits_that_fit_it(rig):
    assert rig.frames(3) == [("OK", 2)] * 3
    rig.primary.fault = "NaN"
    assert rig.frames(2) == [("FAILED", -1)] * 2
    # 20 + 60 ms fit 100 ms, 90 more do not: the fallback has its own durations
    seen = rig.frames(3)
    assert {outcome for outcome, _ in seen} == {"EARLY"}
    assert seen[0] == ("EARLY", 1)
    assert rig.postprocess.heads == [1, 1, 1, 2, 2, 2]
    assert rig.models[0].quantile_ns(Stage.SEGMENT_0) == 2 * MS
    assert rig.models[1].quantile_ns(Stage.SEGMENT_0) == 20 * MS


def test_it_is_said_in_the_shared_state_and_in_every_heartbeat(rig):
    rig.frames(2)
    assert (rig.state.degraded, rig.state.backend_fault) == (0, "")
    assert set(rig.publisher.degraded) == {False}
    rig.primary.fault = "segment 1 failed: NaN"
    rig.frames(2)
    assert rig.state.degraded == 1
    assert rig.state.backend_fault == "gpu: 2 bad frames in a row, last: segment 1 failed: NaN"
    rig.publisher.degraded.clear()
    rig.frames(3)
    assert (rig.state.backend_role, rig.state.backend_switches) == (1, 1)
    assert set(rig.publisher.degraded) == {True}
    rig.primary.fault = ""
    while rig.state.degraded:
        assert rig.frame()[0] in ("EARLY", "OK")
    assert (rig.state.backend_role, rig.state.backend_switches) == (0, 2)
    assert rig.state.backend_fault == ""
    rig.publisher.degraded.clear()
    assert rig.frames(3) == [("OK", 2)] * 3
    assert set(rig.publisher.degraded) == {False}


def test_a_primary_that_hangs_costs_two_frames(rig):
    rig.frames(3)
    rig.primary.durations_ns[0] = NEVER
    assert rig.frames(2) == [("LATE", -1), ("EXPIRED", -1)]
    seen = rig.frames(20)
    assert {outcome for outcome, _ in seen} == {"EARLY"}
    # what hangs is learned by nobody, and keeps no buffer
    assert rig.models[0].quantile_ns(Stage.SEGMENT_0) == 2 * MS
    assert rig.loop._held == []


def test_a_slow_primary_is_left_before_the_watchdog_would_expire(rig):
    rig.frames(3)
    rig.primary.durations_ns[0] = 130 * MS
    seen = [outcome for outcome, _ in rig.frames(12)]
    assert seen[0] == "LATE"
    misses = [outcome in ("LATE", "EXPIRED") for outcome in seen]
    assert sum(misses) <= 4
    assert not any(misses[i : i + 3] == [True] * 3 for i in range(len(misses)))
    assert rig.state.backend_role == 1


CONDITIONS = ("well", "well", "faulty", "slow", "hangs", "hangs deeper", "dead")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CONDITIONS), st.integers(1, 40)), max_size=12))
def test_whatever_the_primary_does_each_frame_has_one_outcome_from_one_backend(script):
    rig = Rig()
    try:
        for condition, count in [*script, ("well", 3)]:
            primary = rig.primary
            primary.fault = "NaN" if condition == "faulty" else ""
            primary.dead = condition == "dead"
            slow = 150 if condition == "slow" else 1
            primary.durations_ns = [ms * slow * MS for ms in FAST]
            if condition.startswith("hangs"):
                primary.durations_ns[condition == "hangs deeper"] = NEVER
            else:
                primary.free()
            for _ in range(count):
                before = len(rig.postprocess.heads)
                outcome, head = rig.frame()
                ran = rig.postprocess.heads[before:]
                assert len(rig.publisher.records) == rig.next_id
                assert (outcome in ("OK", "EARLY", "OVERRUN")) is (head >= 0)
                # an answer comes from the backend that was chosen for this frame, and only one
                assert ran in ([], [1 + rig.state.backend_role])
                assert rig.loop._model is rig.models[rig.state.backend_role]
                assert bool(rig.state.degraded) >= bool(rig.state.backend_role)
                if rig.state.backend_role:
                    assert rig.state.backend_fault
        assert sum(rig.state.outcome_totals) == rig.next_id
    finally:
        rig.state.close()


def test_the_heartbeat_s_counter_never_goes_back(rig):
    counts = []
    for turn in range(60):
        rig.primary.fault = "NaN" if turn < 20 else ""
        rig.frame()
        counts.append(rig.state.inference_count)
    assert counts == sorted(counts)


@pytest.mark.parametrize("first_exit_ms", [60, 150])
def test_the_primary_is_proved_also_where_the_fallback_fits_no_frame(first_exit_ms):
    rig = Rig(slow=(first_exit_ms, 200, 300))
    try:
        assert rig.frames(3) == [("OK", 2)] * 3
        rig.primary.fault = "NaN"
        rig.frames(3)
        assert rig.state.degraded
        rig.primary.fault = ""
        seen = rig.frames(600)
        assert not rig.state.degraded
        assert seen[-100:] == [("OK", 2)] * 100
    finally:
        rig.state.close()
