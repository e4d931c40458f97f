"""The deadline thread's loop: one frame at a time from the newest-frame slot to exactly one
outcome.

Budget of this loop's own Python, everything of a frame that is not preprocess, segments, NMS or
publish: 1 ms. It allocates a few short-lived integers and tuples per frame, nothing that grows;
    it never logs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from perception_rt.capture.slot import NewestSlot
from perception_rt.core.clock import NS_PER_MS, Clock
from perception_rt.core.errors import BackendError
from perception_rt.core.exit_policy import Action, ExitPolicy
from perception_rt.core.frame import FrameBuffer, FrameRecord, Outcome, Stage
from perception_rt.core.latency_model import LatencyModel
from perception_rt.core.occupancy import Occupancy
from perception_rt.detector.backend import PREPROCESS, Backend
from perception_rt.detector.postprocess import Detections, Postprocessor
from perception_rt.latency.recorder import Recorder
from perception_rt.runtime.shared_state import SharedState, WorkerState

HEARTBEAT_PERIOD_NS = 20 * NS_PER_MS
_NOTHING = PREPROCESS - 1
"""Index of no segment at all."""


class Heartbeat:
    """What a WorkerHeartbeat message carries; one object, reused. Fields as in
    WorkerHeartbeat.msg.
    """

    __slots__ = (
        "activation_count",
        "capture_count",
        "deadline_count",
        "delivered_frames",
        "inference_count",
        "node_session_id",
        "outcome_totals",
        "sequence",
        "session_id",
        "source_state",
        "stamp_ns",
        "stamp_source",
        "state",
    )

    def __init__(self, session_id: int, node_session_id: int) -> None:
        self.session_id = session_id
        self.node_session_id = node_session_id
        self.stamp_ns = 0
        self.activation_count = 0
        self.state = int(WorkerState.STARTING)
        self.sequence = 0
        self.capture_count = 0
        self.deadline_count = 0
        self.inference_count = 0
        self.delivered_frames = 0
        self.outcome_totals: list[int] = [0] * len(Outcome)
        self.source_state = 0
        self.stamp_source = 0


class Publisher(Protocol):
    """Where answers, records and heartbeats go. Called from the deadline thread only; must not
    block.
    """

    def warm_up(self, detections: Detections, runs: int) -> list[int]:
        """Rehearse publishing ``runs`` times without being heard; the nanoseconds each took."""

    def detections(self, record: FrameRecord, detections: Detections) -> None:
        """Send the answer of the frame in ``record``; it has left when this returns."""

    def timing(self, record: FrameRecord, totals: list[int]) -> None:
        """Send a finished record with the session's outcome totals (index: Outcome)."""

    def heartbeat(self, beat: Heartbeat) -> None:
        """Send a heartbeat."""


class NullPublisher:
    """Publishes nothing: for replay, where the record ring is the output."""

    def warm_up(self, _detections: Detections, runs: int) -> list[int]:
        """Publishing to nobody takes nothing."""
        return [0] * runs

    def detections(self, record: FrameRecord, detections: Detections) -> None:
        """Send nothing."""

    def timing(self, record: FrameRecord, totals: list[int]) -> None:
        """Send nothing."""

    def heartbeat(self, beat: Heartbeat) -> None:
        """Send nothing."""


class DeadlineLoop:
    """Holds the deadline of every frame that the capture thread puts into the slot.

    Args:
        backend: runs preprocess and segments.
        slot: newest frame; written by the capture thread.
        dropped: records of frames that the capture thread finished itself (REPLACED, FAILED), to
            be reported here.
        model: latency model that the policy asks; observed here.
        policy: decides.
        postprocessor: decode and NMS, once, on the chosen exit.
        publisher: where answers go.
        state: shared with the parent process.
        beat: the reused heartbeat, ids filled in.
        recorder: keeps every record; None without.
        clock: CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        backend: Backend,
        slot: NewestSlot,
        dropped: deque[FrameRecord],
        model: LatencyModel,
        policy: ExitPolicy,
        postprocessor: Postprocessor,
        publisher: Publisher,
        state: SharedState,
        beat: Heartbeat,
        max_det: int,
        recorder: Recorder | None,
        clock: Clock,
    ) -> None:
        self._backend = backend
        self._slot = slot
        self._dropped = dropped
        self._model = model
        self._policy = policy
        self._occupancy = Occupancy()
        self._postprocessor = postprocessor
        self._publisher = publisher
        self._state = state
        self._beat = beat
        self._recorder = recorder
        self._now: Callable[[], int] = clock.now
        self._record = FrameRecord(backend.exit_count)
        self._detections = Detections(max_det)
        self._next_beat_ns = clock.now()
        self._last_beat_ns = 0
        self._command_seq = -1
        self._draining = _NOTHING
        self._held: FrameBuffer | None = None
        self.budget_ns = state.budget_ns
        self.confidence_threshold = state.confidence_threshold
        self.nms_threshold = state.nms_threshold
        self.max_det = state.max_det

    def beat(self, now_ns: int) -> None:
        """Send the heartbeat when it is due; whole periods that were overslept are skipped."""
        if now_ns < self._next_beat_ns:
            return
        self._send_beat(now_ns)
        late = (now_ns - self._next_beat_ns) // HEARTBEAT_PERIOD_NS
        self._next_beat_ns += (late + 1) * HEARTBEAT_PERIOD_NS

    def announce(self, worker_state: WorkerState) -> None:
        """Enter ``worker_state`` and send it at once."""
        self._state.worker_state = worker_state
        self._send_beat(self._now(), always=True)

    def _send_beat(self, now_ns: int, always: bool = False) -> None:
        state, beat = self._state, self._beat
        worker_state = state.worker_state
        state.deadline_count += 1
        state.inference_count = self._backend.progress
        state.sequence += 1
        if self._last_beat_ns:
            state.heartbeat_gap_max_ns = max(
                state.heartbeat_gap_max_ns, now_ns - self._last_beat_ns
            )
        self._last_beat_ns = now_ns
        state.heartbeat_ns = now_ns
        if worker_state != WorkerState.ACTIVE and not always:
            return
        beat.stamp_ns = now_ns
        beat.activation_count = state.activation_count
        beat.state = worker_state
        beat.sequence = state.sequence
        beat.capture_count = state.capture_count
        beat.deadline_count = state.deadline_count
        beat.inference_count = state.inference_count
        beat.delivered_frames = state.delivered_frames
        beat.outcome_totals = state.outcome_totals
        beat.source_state = state.source_state
        beat.stamp_source = state.stamp_source
        self._publisher.heartbeat(beat)

    def refresh_settings(self) -> None:
        """Take over what the parent changed, as one consistent group; a write in progress waits
        for the next frame.
        """
        state = self._state
        before = state.command_seq
        if before == self._command_seq or before & 1:
            return
        budget_ns = state.budget_ns
        confidence = state.confidence_threshold
        nms = state.nms_threshold
        max_det = state.max_det
        if state.command_seq != before:
            return
        self._command_seq = before
        self.budget_ns = budget_ns
        self.confidence_threshold = confidence
        self.nms_threshold = nms
        self.max_det = max_det

    def step(self) -> bool:
        """Report what the capture thread dropped, then wait for a frame, at most until the next
        heartbeat.

        Returns:
            True when a frame was taken to its outcome.
        """
        self.beat(self._now())
        self.refresh_settings()
        self.report_dropped()
        buffer = self._slot.take()
        if buffer is None:
            self._observe_drained(self._now())
            self._slot.wait(max(self._next_beat_ns - self._now(), 0) / 1e9)
            return False
        self._process(buffer)
        return True

    def report_dropped(self) -> None:
        """Report the frames that ended in the capture thread."""
        dropped = self._dropped
        while dropped:
            self._close_record(dropped.popleft())

    def _process(self, buffer: FrameBuffer) -> None:
        record = self._record
        record.begin(buffer, self.budget_ns)
        record.start_ns[Stage.QUEUE] = buffer.capture_end_ns
        launched = -1
        try:
            launched = self._run_frame(buffer, record)
        except BackendError as error:
            record.outcome = Outcome.FAILED
            record.exit_head = -1
            record.reason = str(error)[:200]
            launched = 0
        if record.end_ns[Stage.QUEUE] == 0:
            record.end_ns[Stage.QUEUE] = self._now()
        self._copy_spans(record, launched)
        if launched >= 0 and not self._safe_ready(PREPROCESS):
            # The running thread may still read the pixels: they are given back when it has
            # drained.
            self._held = buffer
        else:
            self._slot.release(buffer)
        self._close_record(record)

    def _run_frame(self, buffer: FrameBuffer, record: FrameRecord) -> int:
        """Take one frame to its outcome; returns the deepest launched segment."""
        backend, policy = self._backend, self._policy
        occupancy = self._occupancy
        occupancy.frame(buffer.frame_id, buffer.epoch, buffer.capture_stamp_ns)
        deadline_ns = record.deadline_ns
        launched = finished = -1
        while True:
            now = self._now()
            self.beat(now)
            if launched < 0 and self._slot.pending:
                record.outcome = Outcome.REPLACED
                return launched
            finished = self._follow(launched, finished)
            busy = launched < 0 and not self._observe_drained(now)
            launched_at_ns = backend.span_ns(finished + 1)[0] if finished < launched else 0
            decision = policy.decide(
                now,
                deadline_ns,
                launched,
                finished,
                busy,
                launched_at_ns,
                occupancy.release_by_ns(now),
            )
            if decision.action == Action.LAUNCH:
                if decision.segment == 0:
                    backend.begin(buffer.image)
                    record.end_ns[Stage.QUEUE] = now
                launched = decision.segment
                backend.launch(launched)
                occupancy.launched(now)
            elif decision.action == Action.WAIT:
                until_ns = min(decision.until_ns, self._next_beat_ns)
                if busy:
                    backend.drain(until_ns)
                else:
                    backend.wait_until(until_ns)
            else:
                assert decision.outcome is not None
                self._draining = launched if launched > finished else _NOTHING
                if decision.outcome == Outcome.EARLY:
                    self._model.refused(finished + 1)
                elif decision.outcome == Outcome.EXPIRED and not busy:
                    self._model.refused(0)
                record.outcome = decision.outcome
                if decision.action == Action.PUBLISH:
                    self._answer(record, decision.segment, decision.outcome)
                return launched

    def _follow(self, launched: int, finished: int) -> int:
        """The deepest finished segment by now."""
        backend = self._backend
        while finished < launched and backend.ready(finished + 1):
            finished += 1
            if finished == launched:
                self._occupancy.idle(backend.span_ns(finished)[1])
        return finished

    def _answer(self, record: FrameRecord, k: int, outcome: Outcome) -> None:
        backend, model = self._backend, self._model
        start_ns = self._now()
        count = self._postprocessor.run(
            backend.detections(k),
            backend.letterbox,
            self.confidence_threshold,
            self.nms_threshold,
            self.max_det,
            self._detections,
        )
        ready_ns = self._now()
        record.start_ns[Stage.POSTPROCESS] = start_ns
        record.end_ns[Stage.POSTPROCESS] = ready_ns
        model.observe(Stage.POSTPROCESS, ready_ns - start_ns)
        if ready_ns >= record.deadline_ns:
            record.outcome = Outcome.LATE
            return
        record.exit_head = k
        record.detection_count = count
        self._publisher.detections(record, self._detections)
        left_ns = self._now()
        record.start_ns[Stage.PUBLISH] = ready_ns
        record.end_ns[Stage.PUBLISH] = left_ns
        record.left_ns = left_ns
        model.observe(Stage.PUBLISH, left_ns - ready_ns)
        record.outcome = outcome if left_ns <= record.deadline_ns else Outcome.LATE

    def _copy_spans(self, record: FrameRecord, launched: int) -> None:
        """Keep the spans of what finished, and let the latency model learn from them."""
        if launched < 0:
            return  # the backend still shows the spans of the frame before
        backend, model = self._backend, self._model
        for k in range(PREPROCESS, launched + 1):
            start_ns, end_ns = backend.span_ns(k)
            if end_ns:
                stage = Stage.PREPROCESS if k == PREPROCESS else Stage.SEGMENT_0 + k
                record.start_ns[stage] = start_ns
                record.end_ns[stage] = end_ns
                model.observe(stage, end_ns - start_ns)
                if k == self._draining:
                    self._draining = _NOTHING

    def _observe_drained(self, now_ns: int) -> bool:
        """True when nothing of an older frame is in flight; the drained segment's true duration
        is learned then.

        Leaving it out would censor exactly the slow runs that the model has to grow from.
        """
        if not self._backend.drain(now_ns):
            return False
        if self._draining >= 0:
            start_ns, end_ns = self._backend.span_ns(self._draining)
            if end_ns:
                self._model.observe(Stage.SEGMENT_0 + self._draining, end_ns - start_ns)
                self._occupancy.idle(end_ns)
            self._draining = _NOTHING
        self._occupancy.idle(now_ns)
        if self._held is not None:
            self._slot.release(self._held)
            self._held = None
        return True

    def _safe_ready(self, k: int) -> bool:
        try:
            return self._backend.ready(k)
        except BackendError:
            return True

    def _close_record(self, record: FrameRecord) -> None:
        state = self._state
        state.add_outcome(record.outcome)
        state.last_frame_id = record.frame_id
        if record.outcome.met:
            state.last_met_ns = record.left_ns
        elif record.outcome == Outcome.FAILED:
            state.frame_fault = record.reason
        if self._recorder is not None:
            self._recorder.append(record)
        self._publisher.timing(record, state.outcome_totals)
