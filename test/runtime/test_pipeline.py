"""The deadline loop against a backend of scripted durations on a manual clock: outcomes to the
nanosecond.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception_rt.capture.slot import NewestSlot
from perception_rt.core.clock import NS_PER_MS, ManualClock
from perception_rt.core.errors import BackendError
from perception_rt.core.exit_policy import ExitPolicy
from perception_rt.core.frame import FrameRecord, Outcome, Stage
from perception_rt.core.latency_model import LatencyModel
from perception_rt.detector.backend import PREPROCESS
from perception_rt.detector.postprocess import Postprocessor
from perception_rt.detector.preprocess import letterbox_geometry
from perception_rt.runtime.pipeline import HEARTBEAT_PERIOD_NS, DeadlineLoop
from perception_rt.runtime.publisher import Heartbeat
from perception_rt.runtime.shared_state import SharedState, WorkerState

MS = NS_PER_MS
NEVER = 10**15
EXITS = 3


class ScriptedBackend:
    """Runs on a manual clock: preprocess 1 ms, segment k as long as ``script[frame][k]`` says
    (ms).
    """

    look_ahead = 0
    double_buffered = False
    exit_count = EXITS
    progress = 0
    letterbox = letterbox_geometry(32, 24, 32, 32)

    def __init__(self, clock, script, fault_at=None):
        self.clock = clock
        self.script = script
        self.fault_at = fault_at
        self.frame = -1
        self.spans = {}
        self.free_at = self.previous_end = 0
        self.begun = []

    def begin(self, image):
        if not self.double_buffered:
            assert self.clock.now() >= self.free_at, "begin while something is in flight"
        self.frame += 1
        self.previous_end = self.free_at
        self.spans = {}
        self.begun.append(image)
        self._queue(PREPROCESS, MS)

    def launch(self, k):
        assert k - 1 in self.spans
        self._queue(k, self.script[min(self.frame, len(self.script) - 1)][k])

    def _queue(self, k, duration_ns):
        start = max(self.clock.now(), self.free_at)
        self.spans[k] = (start, start + duration_ns)
        self.free_at = start + duration_ns

    def ready(self, k):
        done = k in self.spans and self.spans[k][1] <= self.clock.now()
        if done and self.fault_at == (self.frame, k):
            raise BackendError(f"segment {k} returned NaN")
        return done

    def wait_until(self, t_ns):
        coming = [end for _, end in self.spans.values() if end > self.clock.now()]
        if coming and min(coming) <= t_ns:
            self.clock.advance_to(min(coming))
            return True
        self.clock.advance_to(t_ns)
        return False

    def drain(self, t_ns):
        self.clock.advance_to(
            min(max(t_ns, self.clock.now()), max(self.free_at, self.clock.now()))
        )
        return self.free_at <= self.clock.now()

    def detections(self, k):
        return np.zeros((1, 84), np.float32)

    def span_ns(self, k):
        start, end = self.spans.get(k, (0, 0))
        return (start, end) if end and end <= self.clock.now() else (start, 0)

    def previous_end_ns(self):
        return self.previous_end if self.previous_end <= self.clock.now() else 0

    def close(self, timeout_s=1.0):
        return True


class DoubleBuffered(ScriptedBackend):
    """What is queued behind an older frame's work, or a segment ahead, starts when that ends."""

    look_ahead = 1
    double_buffered = True

    def begin(self, image):
        # The frame before may be in flight, in the other set; the one before that may not.
        assert self.previous_end <= self.clock.now(), "both buffer sets are in flight"
        super().begin(image)

    def span_ns(self, k):
        start, end = super().span_ns(k)
        return (start, end) if start <= self.clock.now() else (0, 0)


class Queueing(DoubleBuffered):
    """Shows the instant of queueing as the start of what has not started, as on a GPU."""

    def _queue(self, k, duration_ns):
        self.queued_ns = {**getattr(self, "queued_ns", {}), k: self.clock.now()}
        super()._queue(k, duration_ns)

    def span_ns(self, k):
        start, end = super().span_ns(k)
        return (start, end) if start or k not in self.spans else (self.queued_ns[k], 0)


class Postprocess(Postprocessor):
    def __init__(self, clock, took_ns=MS):
        self.clock = clock
        self.took_ns = took_ns

    def run(self, tensor, letterbox, confidence, nms, max_det, out):
        self.clock.advance(self.took_ns)
        out.count = 2
        return 2


class Publisher:
    def __init__(self, clock, took_ns=MS):
        self.clock = clock
        self.took_ns = took_ns
        self.left = []
        self.records = []
        self.beats = []

    def warm_up(self, detections, runs):
        return [self.took_ns] * runs

    def detections(self, record, detections):
        self.clock.advance(self.took_ns)
        self.left.append((record.frame_id, record.exit_head, detections.count))

    def timing(self, record, totals):
        self.records.append((record.frame_id, record.outcome, record.exit_head, self.clock.now()))
        self.last = {s: getattr(record, s) for s in FrameRecord.__slots__}
        self.last["start_ns"] = list(record.start_ns)
        self.last["end_ns"] = list(record.end_ns)
        self.totals = totals

    def heartbeat(self, beat):
        self.beats.append((beat.stamp_ns, beat.state, beat.sequence))


class Rig:
    def __init__(
        self, script, budget_ms=100, fault_at=None, publish_ns=MS, backend=ScriptedBackend
    ):
        self.clock = ManualClock(1_000 * MS)
        self.state = SharedState.create()
        self.state.budget_ns = budget_ms * MS
        self.state.confidence_threshold = 0.4
        self.state.max_det = 10
        self.backend = backend(self.clock, script, fault_at)
        self.slot = NewestSlot(5)
        self.dropped = deque()
        self.model = LatencyModel(EXITS)
        self.model.prior(Stage.PREPROCESS, [MS])
        self.model.prior(Stage.POSTPROCESS, [MS])
        self.model.prior(Stage.PUBLISH, [MS])
        for k, ms in enumerate((10, 20, 30)):
            self.model.prior(Stage.SEGMENT_0 + k, [ms * MS])
        self.publisher = Publisher(self.clock, publish_ns)
        self.loop = DeadlineLoop(
            self.backend,
            self.slot,
            self.dropped,
            self.model,
            ExitPolicy(EXITS, self.model, wake_margin_ns=MS, look_ahead=backend.look_ahead),
            Postprocess(self.clock),
            self.publisher,
            self.state,
            Heartbeat(7, 8),
            10,
            None,
            self.clock,
        )
        self.state.worker_state = WorkerState.ACTIVE
        self.next_id = 0

    def deliver(self, stamp_ns=None):
        self.next_id += 1
        buffer = self.slot.writable()
        buffer.reserve(24, 32)
        buffer.frame_id = self.next_id
        buffer.capture_stamp_ns = self.clock.now() if stamp_ns is None else stamp_ns
        buffer.capture_start_ns = buffer.capture_end_ns = buffer.capture_stamp_ns
        return self.slot.put(buffer)

    def run(self):
        assert self.loop.step()
        return self.publisher.records[-1]


@pytest.fixture
def rig():
    made = []

    def make(*args, **kwargs):
        made.append(Rig(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.state.close()


PLAIN = [[10 * MS, 20 * MS, 30 * MS]]


def test_all_segments_fit(rig):
    r = rig(PLAIN)
    r.deliver()
    assert r.run() == (1, Outcome.OK, 2, 1_063 * MS)
    assert r.publisher.left == [(1, 2, 2)]
    assert r.publisher.last["left_ns"] == 1_063 * MS
    spans = list(zip(r.publisher.last["start_ns"], r.publisher.last["end_ns"]))
    assert spans[Stage.QUEUE] == (1_000 * MS, 1_000 * MS)
    assert spans[Stage.PREPROCESS] == (1_000 * MS, 1_001 * MS)
    assert spans[Stage.SEGMENT_0] == (1_001 * MS, 1_011 * MS)
    assert spans[Stage.SEGMENT_0 + 1] == (1_011 * MS, 1_031 * MS)
    assert spans[Stage.SEGMENT_0 + 2] == (1_031 * MS, 1_061 * MS)
    assert spans[Stage.POSTPROCESS] == (1_061 * MS, 1_062 * MS)
    assert spans[Stage.PUBLISH] == (1_062 * MS, 1_063 * MS)


def test_the_last_segment_does_not_fit(rig):
    r = rig(PLAIN, budget_ms=60)
    r.deliver()
    assert r.run() == (1, Outcome.EARLY, 1, 1_033 * MS)


def test_a_slow_segment_is_overrun_and_the_exit_before_it_leaves(rig):
    r = rig([[10 * MS, 20 * MS, 200 * MS]], budget_ms=80)
    r.deliver()
    # M = 1 + 1 + 1: released at 1_077, out 2 ms later.
    assert r.run() == (1, Outcome.OVERRUN, 1, 1_079 * MS)
    assert r.publisher.last["end_ns"][Stage.SEGMENT_0 + 2] == 0


def test_what_the_overrun_really_took_is_learned_once_it_drained(rig):
    r = rig([[10 * MS, 20 * MS, 90 * MS], *PLAIN], budget_ms=80)
    r.deliver()
    r.run()
    assert r.model.quantile_ns(Stage.SEGMENT_0 + 2) == 30 * MS
    r.clock.advance_to(1_200 * MS)
    r.deliver()
    assert r.run()[1:3] == (Outcome.EARLY, 1)
    assert r.model.quantile_ns(Stage.SEGMENT_0 + 2) == 90 * MS


def test_a_segment_that_never_returns_is_a_miss_at_the_deadline(rig):
    r = rig([[NEVER, 0, 0]], budget_ms=50)
    r.deliver()
    assert r.run() == (1, Outcome.LATE, -1, 1_050 * MS)
    assert r.publisher.left == []
    # The next frame cannot be started: it is given up when its first exit stops to fit, before
    # its deadline.
    r.deliver()
    frame_id, outcome, head, at = r.run()
    assert (frame_id, outcome, head) == (2, Outcome.EXPIRED, -1)
    assert 1_050 * MS < at <= 1_100 * MS
    # Heartbeats never stopped meanwhile.
    stamps = [stamp for stamp, _, _ in r.publisher.beats]
    assert max(b - a for a, b in pairwise(stamps)) == HEARTBEAT_PERIOD_NS


def test_buffers_of_a_hung_preprocess_are_not_given_back(rig):
    r = rig([[NEVER, 0, 0]], budget_ms=50)
    r.backend._queue = lambda k, ns: ScriptedBackend._queue(r.backend, k, NEVER)
    r.deliver()
    r.run()
    image = r.backend.begun[0]
    for _ in range(10):
        r.deliver()
        assert r.slot._newest[0].image is not image
        r.run()


def test_a_frame_too_old_is_not_computed(rig):
    r = rig(PLAIN, budget_ms=100)
    r.deliver(stamp_ns=r.clock.now() - 90 * MS)
    assert r.run() == (1, Outcome.EXPIRED, -1, 1_000 * MS)
    assert r.backend.begun == []


def test_a_frame_that_never_began_has_no_spans_of_the_one_before(rig):
    r = rig(PLAIN)
    r.deliver()
    r.run()
    r.deliver(stamp_ns=r.clock.now() - 90 * MS)
    assert r.run()[1] == Outcome.EXPIRED
    assert r.publisher.last["end_ns"][Stage.PREPROCESS] == 0
    assert sum(r.publisher.last["end_ns"][Stage.SEGMENT_0 :]) == 0


def test_a_newer_frame_replaces_one_that_waits_for_the_drain(rig):
    r = rig([[10 * MS, 20 * MS, 120 * MS], *PLAIN], budget_ms=80)
    r.deliver()
    r.run()
    r.deliver()
    drain = r.backend.drain

    def deliver_meanwhile(t_ns):
        done = drain(t_ns)
        if not done and r.next_id == 2 and r.clock.now() > 1_085 * MS:
            r.deliver()
        return done

    r.backend.drain = deliver_meanwhile
    assert r.run()[:3] == (2, Outcome.REPLACED, -1)
    assert r.run()[0] == 3


def test_nan_is_a_fault_of_that_frame_only(rig):
    r = rig(PLAIN, fault_at=(0, 1))
    r.deliver()
    assert r.run()[:3] == (1, Outcome.FAILED, -1)
    assert r.publisher.last["reason"] == "segment 1 returned NaN"
    assert r.publisher.left == []
    r.clock.advance(100 * MS)
    r.deliver()
    assert r.run()[:3] == (2, Outcome.OK, 2)


def test_an_answer_that_left_late_is_not_called_met(rig):
    r = rig(PLAIN, budget_ms=63, publish_ns=32 * MS)
    r.deliver()
    assert r.run()[1] == Outcome.LATE
    assert r.publisher.last["left_ns"] > r.publisher.last["deadline_ns"]


def test_frames_that_ended_in_capture_are_reported(rig):
    r = rig(PLAIN)
    record = FrameRecord(EXITS)
    record.frame_id = 5
    record.outcome = Outcome.REPLACED
    r.dropped.append(record)
    r.deliver()
    r.run()
    assert [(i, o) for i, o, _, _ in r.publisher.records] == [
        (5, Outcome.REPLACED),
        (1, Outcome.OK),
    ]
    assert r.publisher.totals == [1, 0, 0, 0, 0, 1, 0]


def test_settings_change_on_the_next_frame(rig):
    r = rig(PLAIN)
    r.deliver()
    r.run()
    r.state.command_seq += 2
    r.state.budget_ns = 60 * MS
    r.deliver()
    assert r.run()[1:3] == (Outcome.EARLY, 1)
    assert r.publisher.last["budget_ns"] == 60 * MS


def test_a_half_written_group_of_settings_waits(rig):
    r = rig(PLAIN)
    r.state.command_seq = 1
    r.state.budget_ns = 5 * MS
    r.deliver()
    assert r.run()[1] == Outcome.OK


def test_no_heartbeat_while_inactive(rig):
    r = rig(PLAIN)
    r.state.worker_state = WorkerState.INACTIVE
    for _ in range(5):
        r.loop.beat(r.clock.now())
        r.clock.advance(20 * MS)
    assert r.publisher.beats == []
    assert r.state.heartbeat_ns == 1_080 * MS
    r.loop.announce(WorkerState.ACTIVE)
    assert [state for _, state, _ in r.publisher.beats] == [WorkerState.ACTIVE]


def test_overslept_beats_are_skipped_not_sent_in_a_burst(rig):
    r = rig(PLAIN)
    for at_ms in (1_000, 1_020, 1_095, 1_096, 1_100, 1_120):
        r.clock.advance_to(at_ms * MS)
        r.loop.beat(r.clock.now())
    assert [s // MS for s, _, _ in r.publisher.beats] == [1_000, 1_020, 1_095, 1_100, 1_120]
    assert r.state.heartbeat_gap_max_ns == 75 * MS


def test_look_ahead_queues_the_next_segment_and_one_overrun_drains_both(rig):
    r = rig([[10 * MS, 200 * MS, 30 * MS]], budget_ms=100, backend=DoubleBuffered)
    r.deliver()
    # Segment 2 was queued behind segment 1 while that looked as if it fitted.
    assert r.run() == (1, Outcome.OVERRUN, 0, 1_099 * MS)
    assert r.backend.spans[2] == (1_211 * MS, 1_241 * MS)
    r.clock.advance_to(1_300 * MS)
    r.deliver()
    r.run()
    assert r.model.quantile_ns(Stage.SEGMENT_0 + 1) == 200 * MS


def test_the_next_frame_queues_behind_the_drain_and_counts_it(rig):
    r = rig([[10 * MS, 20 * MS, 45 * MS], *PLAIN], budget_ms=70, backend=DoubleBuffered)
    r.model.prior(Stage.SEGMENT_0 + 2, [34 * MS])
    r.deliver()
    # 31 + 34 + M <= 70: launched; at 67 it is not ready.
    assert r.run() == (1, Outcome.OVERRUN, 1, 1_069 * MS)
    r.model.prior(Stage.SEGMENT_0 + 2, [50 * MS])
    r.deliver()
    # It begins at 1_069, runs from 1_076 on, when segment 2 of the frame before ends.
    frame_id, outcome, head, _ = r.run()
    assert (frame_id, outcome, head) == (2, Outcome.EARLY, 1)
    spans = list(zip(r.publisher.last["start_ns"], r.publisher.last["end_ns"]))
    assert spans[Stage.PREPROCESS] == (1_076 * MS, 1_077 * MS)
    # And the true 45 ms of the drained segment were learned.
    assert 45 * MS in r.model._stages[Stage.SEGMENT_0 + 2]._ring


def test_nothing_is_queued_behind_a_segment_that_outlived_its_quantile(rig):
    r = rig([[10 * MS, 20 * MS, 500 * MS], *PLAIN], budget_ms=80, backend=DoubleBuffered)
    r.deliver()
    assert r.run()[1] == Outcome.OVERRUN
    r.deliver()
    assert r.run()[1:3] == (Outcome.EXPIRED, -1)
    assert len(r.backend.begun) == 1


def test_a_frame_that_is_refused_has_no_spans_of_another(rig, monkeypatch):
    r = rig(PLAIN)
    r.deliver()
    r.run()
    learned = len(r.model._stages[Stage.SEGMENT_0]._ring)
    r.clock.advance_to(1_200 * MS)
    r.deliver()

    def refuse(image):
        raise BackendError("the GPU was lost")

    monkeypatch.setattr(r.backend, "begin", refuse)
    assert r.run()[1] == Outcome.FAILED
    assert r.publisher.last["start_ns"][Stage.PREPROCESS] == 0
    assert len(r.model._stages[Stage.SEGMENT_0]._ring) == learned


def test_look_ahead_counts_what_the_frame_is_queued_behind(rig):
    r = rig([[10 * MS, 20 * MS, 75 * MS], [10 * MS, 20 * MS, 30 * MS]], 70, backend=Queueing)
    r.model.prior(Stage.SEGMENT_0 + 2, [34 * MS])
    r.deliver()
    assert r.run()[1:3] == (Outcome.OVERRUN, 1)
    r.model.prior(Stage.SEGMENT_0 + 2, [80 * MS])
    r.deliver()
    # Its first segment ends at 1_117; a second one behind it would end at 1_137, too late.
    assert r.run()[1:] == (Outcome.EARLY, 0, 1_119 * MS)


durations = st.integers(1, 80).map(lambda ms: ms * MS) | st.just(NEVER)


@settings(max_examples=150)
@given(
    script=st.lists(st.tuples(durations, durations, durations), min_size=1, max_size=12),
    gaps=st.lists(st.integers(0, 120), min_size=1, max_size=12),
    budget_ms=st.integers(5, 150),
    backend=st.sampled_from([ScriptedBackend, DoubleBuffered]),
)
def test_every_frame_has_one_outcome_by_its_deadline(script, gaps, budget_ms, backend):
    r = Rig(script, budget_ms=budget_ms, backend=backend)
    try:
        for gap in gaps:
            r.clock.advance(gap * MS)
            assert r.deliver() is None
            r.run()
        ids = [frame_id for frame_id, *_ in r.publisher.records]
        assert ids == list(range(1, len(gaps) + 1))
        assert sum(r.state.outcome_totals) == len(gaps)
        met = [(i, head) for i, outcome, head, _ in r.publisher.records if outcome.met]
        assert met == [(i, head) for i, head, _ in r.publisher.left]
    finally:
        r.state.close()
