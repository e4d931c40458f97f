"""The deadline thread's loop: one frame at a time from the newest-frame slot to exactly one
outcome.

Budget of this loop's own Python, everything of a frame that is not preprocess, segments, NMS or
publish: 1 ms. It allocates a few short-lived integers and tuples per frame, nothing that grows;
it never logs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from perception_rt.capture.slot import NewestSlot
from perception_rt.core.clock import NS_PER_MS, Clock
from perception_rt.core.errors import BackendError
from perception_rt.core.exit_policy import Action, ExitPolicy
from perception_rt.core.frame import FrameBuffer, FrameRecord, Outcome, Stage
from perception_rt.core.latency_model import LatencyModel
from perception_rt.core.occupancy import Occupancy
from perception_rt.detector.backend import PREPROCESS, Backend
from perception_rt.detector.postprocess import Detections, Postprocessor
from perception_rt.detector.switching_backend import Role, SwitchingBackend
from perception_rt.latency.recorder import Recorder
from perception_rt.runtime.publisher import Heartbeat, Publisher
from perception_rt.runtime.shared_state import SharedState, WorkerState

HEARTBEAT_PERIOD_NS = 20 * NS_PER_MS


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
        fallback: latency model and policy of the fallback, where ``backend`` is a
            SwitchingBackend.
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
        fallback: tuple[LatencyModel, ExitPolicy] | None = None,
    ) -> None:
        self._backend = backend
        self._switch = backend if isinstance(backend, SwitchingBackend) else None
        self._judges = ((model, policy), fallback or (model, policy))
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
        self._fault_told = ""
        # In flight when a frame ended: its segments from .. to, and when the first of them began.
        self._draining = range(0)
        self._previous: tuple[int, int] | None = None  # (segment, start_ns) a frame queued behind
        self._behind_ns = 0  # expected end of the work that the present frame is queued behind
        self._held: list[FrameBuffer] = []
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
        beat.degraded = bool(state.degraded)
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
        if self._switch is not None and self._switch.choose(self._now(), self.budget_ns):
            self._on_switch(self._switch.role)
        record.begin(buffer, self.budget_ns)
        record.start_ns[Stage.QUEUE] = buffer.capture_end_ns
        launched = -1
        try:
            launched = self._run_frame(buffer, record)
        except BackendError as error:
            record.outcome = Outcome.FAILED
            record.exit_head = -1
            record.reason = str(error)[:200]
            # Refused before it began, it has no spans: the backend shows those of another frame.
            launched = 0 if record.end_ns[Stage.QUEUE] else -1
        if record.end_ns[Stage.QUEUE] == 0:
            record.end_ns[Stage.QUEUE] = self._now()
        self._copy_spans(record, launched)
        if launched >= 0 and not self._safe_ready(PREPROCESS):
            # The running thread may still read the pixels: they are given back when it has
            # drained.
            self._held.append(buffer)
        else:
            self._slot.release(buffer)
        if self._switch is not None:
            self._tell_switch(self._switch, record)
        self._close_record(record)

    def _on_switch(self, role: Role) -> None:
        """Another backend has other durations; what the one before still runs is its own."""
        self._model, self._policy = self._judges[role]
        self._occupancy = Occupancy()
        self._draining = range(0)
        self._previous = None

    def _tell_switch(self, switch: SwitchingBackend, record: FrameRecord) -> None:
        fits = self._policy.latest_start_ns(record.deadline_ns) >= record.capture_stamp_ns
        switch.frame_ended(record.outcome, record.deadline_ns, self._now(), record.reason, fits)
        state = self._state
        reason = switch.reason
        if reason != self._fault_told:
            self._fault_told = reason
            state.backend_fault = reason
        state.degraded = int(switch.degraded)
        state.backend_role = switch.role
        state.backend_switches = switch.switches

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
            backlog_ns = self._backlog_ns(now) if launched < 0 else 0
            launched_at_ns = 0
            if finished < launched:
                launched_at_ns = self._begins_ns(finished + 1, now, deadline_ns)
            decision = policy.decide(
                now,
                deadline_ns,
                launched,
                finished,
                backlog_ns is None,
                launched_at_ns,
                occupancy.release_by_ns(now),
                backlog_ns or 0,
            )
            if decision.action == Action.LAUNCH:
                if decision.segment == 0:
                    self._behind_ns = now + backlog_ns if backlog_ns else 0
                    self._queue_behind()
                    backend.begin(buffer.image)
                    record.end_ns[Stage.QUEUE] = now
                launched = decision.segment
                backend.launch(launched)
                occupancy.launched(now)
            elif decision.action == Action.WAIT:
                until_ns = min(decision.until_ns, self._next_beat_ns)
                if backlog_ns is None:
                    backend.drain(until_ns)
                else:
                    backend.wait_until(until_ns)
            else:
                assert decision.outcome is not None
                self._draining = range(finished + 1, launched + 1)
                if decision.outcome == Outcome.EARLY:
                    self._model.refused(finished + 1)
                elif decision.outcome == Outcome.EXPIRED and backlog_ns == 0:
                    self._model.refused(0)
                record.outcome = decision.outcome
                if decision.action == Action.PUBLISH:
                    self._answer(record, decision.segment, decision.outcome)
                return launched

    def _begins_ns(self, k: int, now_ns: int, deadline_ns: int) -> int:
        """When segment ``k``, launched and not finished, began or will begin, at the latest: while
        older work runs that is behind it, and unknown once that takes longer than was expected.
        """
        start_ns = self._backend.span_ns(k)[0]
        if self._behind_ns and not self._backend.previous_end_ns():
            return max(start_ns, self._behind_ns) if now_ns < self._behind_ns else deadline_ns
        return start_ns

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
                if k in self._draining:
                    self._draining = range(k + 1, self._draining.stop)
        self._observe_previous()

    def _backlog_ns(self, now_ns: int) -> int | None:
        """How long older work will still take: 0 when nothing drains; None when the next frame has
        to wait for it, because it cannot be queued behind or has outlived its quantile.
        """
        if self._observe_drained(now_ns):
            return 0
        if not self._backend.double_buffered or not self._draining or self._previous is not None:
            return None
        first = self._draining.start
        start_ns = self._backend.span_ns(first)[0]
        if start_ns == 0:
            return None
        model = self._model
        left_ns = start_ns + model.quantile_ns(Stage.SEGMENT_0 + first) - now_ns
        if left_ns <= 0:
            return None
        for k in self._draining[1:]:
            left_ns += model.quantile_ns(Stage.SEGMENT_0 + k)
        return left_ns

    def _queue_behind(self) -> None:
        """A frame is about to begin: spans of what drains are not the present frame's any more."""
        if len(self._draining) == 1:
            k = self._draining.start
            self._previous = (k, self._backend.span_ns(k)[0])
        self._draining = range(0)

    def _observe_previous(self) -> None:
        """Learn how long the segment took that the present frame was queued behind."""
        if self._previous is None:
            return
        end_ns = self._backend.previous_end_ns()
        if end_ns:
            k, start_ns = self._previous
            self._model.observe(Stage.SEGMENT_0 + k, end_ns - start_ns)
            self._previous = None

    def _observe_drained(self, now_ns: int) -> bool:
        """True when nothing of an older frame is in flight; the drained segment's true duration
        is learned then.

        Leaving it out would censor exactly the slow runs that the model has to grow from.
        """
        if not self._backend.drain(now_ns):
            return False
        self._observe_previous()
        self._previous = None
        end_ns = now_ns
        for k in self._draining:
            start_ns, ended_ns = self._backend.span_ns(k)
            if ended_ns:
                self._model.observe(Stage.SEGMENT_0 + k, ended_ns - start_ns)
                end_ns = ended_ns
        self._draining = range(0)
        self._occupancy.idle(end_ns)
        while self._held:
            self._slot.release(self._held.pop())
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
