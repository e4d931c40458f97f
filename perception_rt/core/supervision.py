"""The watchdog's judgement of one detector: pure, fed with facts and its own monotonic instants.

States: DEACTIVATED -> OK at activation; OK <-> FAILED, debounced and leaky (every bad cycle adds
one to an error count, every good one takes one off, above ``tolerance`` it is EXPIRED); EXPIRED is
latched until the detector is deactivated and activated on purpose. A node shows that by a larger
activation count: a restart of its worker keeps the count, one of its own begins another session. A
supervisor that was late itself reports SELF_LAG, blames nobody for that, and returns to what was
at the next heartbeat.

The permit is given in OK and FAILED, from the first met frame of an activation on. A detector that
runs on its fallback backend keeps it; DEGRADED then stands among the causes.
"""

from __future__ import annotations

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.frame import Outcome
from perception_rt.core.supervision_facts import (
    Cause,
    FrameFacts,
    HeartbeatFacts,
    SourceState,
    State,
    SupervisionConfig,
    SupervisionResult,
    WorkerState,
    plausible_beat,
    plausible_frame,
    went_back,
)

__all__ = [
    "Cause",
    "FrameFacts",
    "HeartbeatFacts",
    "SourceState",
    "State",
    "SupervisionConfig",
    "SupervisionResult",
    "Supervisor",
    "WorkerState",
]

_MAX_PENDING = 64  # frames unheard of at a time; more are given up as lost at once
_NO_CAUSE = Cause(0)


class Supervisor:
    """Judges one detector. Call ``on_heartbeat`` and ``on_frame`` as they are received and
    ``cycle`` every period.

    All ``now_ns`` are the supervisor's own CLOCK_MONOTONIC instants, of receipt or of the cycle.

    Args:
        config: the limits.
    """

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._state = State.DEACTIVATED
        self._causes = _NO_CAUSE  # that led to FAILED or EXPIRED
        self._reason = "no detector seen yet"
        self._errors = 0
        self._events = _NO_CAUSE  # since the last cycle
        self._event_reason = ""
        self._beat: HeartbeatFacts | None = None
        self._beat_ns = -1
        self._active_session = 0  # worker that was last seen ACTIVE
        self._activation: tuple[int, int] | None = None  # newest: node session, count
        self._activated_ns = 0
        self._frozen_deadline = 0
        self._frozen_capture = 0
        self._first_frame_id = 0
        self._last_frame_id = 0
        self._frame_ns = -1
        self._met_stamp_ns = -1
        self._epoch = 0
        self._epoch_changes = 0
        self._pending: dict[int, int] = {}  # id not heard of -> instant it counts as lost at
        self._lost_frames = 0
        self._window = 0  # newest frame in bit 0, set for a miss
        self._window_held = 0
        self._consecutive = 0
        self._blind_ns = 0  # nothing is held against anybody before this instant: own lag
        self._lagging = False
        self._skipped_cycles = 0

    def on_heartbeat(self, now_ns: int, beat: HeartbeatFacts) -> None:
        """Take in one heartbeat received at ``now_ns``."""
        last = self._beat
        if last is not None and last.session_id != beat.session_id:
            last = None
        if not plausible_beat(beat):
            self._expire(Cause.DATA, "heartbeat with values that cannot be")
            return
        if last is None:
            self._on_new_worker()
        elif beat.sequence <= last.sequence:
            self._event(Cause.LOGICAL, f"heartbeat {beat.sequence} came after {last.sequence}")
            return
        elif went_back(last, beat):
            self._expire(Cause.DATA, f"heartbeat {beat.sequence} has counters that went back")
            return
        else:
            deadline_stood = beat.deadline_count == last.deadline_count
            capture_stood = beat.capture_count == last.capture_count
            self._frozen_deadline = self._frozen_deadline + 1 if deadline_stood else 0
            self._frozen_capture = self._frozen_capture + 1 if capture_stood else 0
        if beat.state == WorkerState.ACTIVE:
            self._on_active(now_ns, beat)
        elif beat.state == WorkerState.INACTIVE and beat.session_id == self._active_session:
            self._deactivate("the detector is deactivated")
        elif self._state == State.DEACTIVATED or (
            self._judging and beat.state == WorkerState.STOPPING
        ):
            self._deactivate(f"the worker is {WorkerState(beat.state).name.lower()}")
        elif self._judging:
            self._expire(Cause.LOGICAL, "the worker went back to its start without deactivation")
        self._beat = beat
        self._beat_ns = now_ns
        self._lagging = False

    @property
    def _judging(self) -> bool:
        return self._state in (State.OK, State.FAILED)

    def _on_active(self, now_ns: int, beat: HeartbeatFacts) -> None:
        activation = (beat.node_session_id, beat.activation_count)
        last = self._activation
        # A node counts up only when it is activated on purpose, hence after a deactivation:
        # whether that one was heard of, and by which of its workers, does not matter.
        again = last is not None and activation[0] == last[0] and activation[1] > last[1]
        if again or (self._state == State.DEACTIVATED and last is None):
            self._activate(now_ns)
        elif self._state == State.DEACTIVATED and activation != self._activation:
            self._expire(
                Cause.ALIVE, "the detector node was restarted: deactivate and activate it"
            )
        elif self._state == State.DEACTIVATED:
            self._reason = "the worker came back without an activation: deactivate and activate it"
        self._active_session = beat.session_id
        self._activation = activation

    def _activate(self, now_ns: int) -> None:
        self._state = State.OK
        self._causes = self._events = _NO_CAUSE
        self._reason = self._event_reason = ""
        self._errors = 0
        self._activated_ns = now_ns
        self._frozen_deadline = self._frozen_capture = 0
        self._window = self._window_held = self._consecutive = 0
        self._met_stamp_ns = -1
        self._forget_frames()

    def _deactivate(self, reason: str) -> None:
        self._state = State.DEACTIVATED
        self._causes = _NO_CAUSE
        self._reason = reason
        self._errors = 0

    def _on_new_worker(self) -> None:
        self._forget_frames()
        self._lost_frames = self._epoch = self._epoch_changes = 0
        self._frozen_deadline = self._frozen_capture = 0
        if self._judging:
            self._expire(Cause.ALIVE, "the worker was restarted: deactivate and activate it")

    def _forget_frames(self) -> None:
        self._first_frame_id = self._last_frame_id = 0
        self._frame_ns = -1
        self._pending.clear()

    def _event(self, cause: Cause, reason: str) -> None:
        """A fault that makes the next cycle a bad one."""
        self._events |= cause
        self._event_reason = self._event_reason or reason

    def _expire(self, causes: Cause, reason: str) -> None:
        if self._state != State.EXPIRED:
            self._state = State.EXPIRED
            self._causes = causes
            self._reason = reason

    def on_frame(self, now_ns: int, frame: FrameFacts) -> None:
        """Take in one FrameTiming received at ``now_ns``; one of an unknown worker is ignored."""
        if not plausible_frame(frame):
            self._expire(Cause.DATA, f"frame timing {frame.frame_id} with values that cannot be")
            return
        if (
            self._beat is None
            or frame.session_id != self._beat.session_id
            or self._state == State.DEACTIVATED
        ):
            return
        if not self._track(now_ns, frame):
            return
        self._frame_ns = max(self._frame_ns, now_ns)
        if frame.epoch > self._epoch:
            self._epoch_changes += frame.epoch - self._epoch
            self._epoch = frame.epoch
        if frame.frame_skip and frame.outcome == Outcome.REPLACED:
            return
        miss = frame.outcome > Outcome.OVERRUN
        if not miss:
            miss = not self._left_in_time(now_ns, frame)
        self._count(frame.frame_id, miss)

    def _left_in_time(self, now_ns: int, frame: FrameFacts) -> bool:
        """Check what a frame that claims to be met says of itself; False when it is a miss."""
        config = self._config
        if frame.exit_head < 0 or frame.left_ns < frame.capture_stamp_ns:
            self._event(Cause.LOGICAL, f"frame {frame.frame_id} is called met, but nothing left")
            return False
        if frame.left_ns > frame.deadline_ns:
            self._event(
                Cause.DEADLINE,
                f"frame {frame.frame_id} is called met, but left late",
            )
            return False
        if frame.exit_head < config.min_exit_head:
            self._event(
                Cause.DATA, f"frame {frame.frame_id} came from exit head {frame.exit_head}"
            )
        if now_ns > frame.deadline_ns + config.report_patience_ns:
            self._event(Cause.DATA, f"frame {frame.frame_id} was reported long after its deadline")
        self._met_stamp_ns = max(self._met_stamp_ns, frame.capture_stamp_ns)
        return True

    def _track(self, now_ns: int, frame: FrameFacts) -> bool:
        """Follow the ids. A replaced frame may be reported before an older one still computed."""
        frame_id, last = frame.frame_id, self._last_frame_id
        if not last:
            self._first_frame_id = self._last_frame_id = frame_id
        elif frame_id > last:
            gap = frame_id - last - 1
            if gap > _MAX_PENDING - len(self._pending):
                self._lose(gap)
            elif gap:
                # They were captured before this frame, so their deadlines are not after its own.
                due_ns = max(now_ns, frame.deadline_ns) + self._config.report_patience_ns
                for missing in range(last + 1, frame_id):
                    self._pending[missing] = due_ns
            self._last_frame_id = frame_id
        elif self._pending.pop(frame_id, None) is None and frame_id >= self._first_frame_id:
            self._event(Cause.LOGICAL, f"frame {frame_id} was reported again")
            return False
        return True

    def _lose(self, count: int) -> None:
        self._lost_frames += count
        self._event(Cause.DATA, f"{count} frames were never reported")

    def _count(self, frame_id: int, miss: bool) -> None:
        config = self._config
        self._window = (self._window << 1 | miss) & ((1 << config.window_length) - 1)
        self._window_held = min(self._window_held + 1, config.window_length)
        self._consecutive = self._consecutive + 1 if miss else 0
        misses = self._window.bit_count()
        if misses > config.window_expired:
            self._expire(
                Cause.DEADLINE,
                f"{misses} misses in {self._window_held} frames, up to frame {frame_id}",
            )
        elif self._consecutive >= config.consecutive_expired:
            self._expire(
                Cause.DEADLINE, f"{self._consecutive} misses in a row, up to frame {frame_id}"
            )

    def cycle(self, now_ns: int, lateness_ns: int) -> SupervisionResult:
        """Judge, once a period.

        Args:
            now_ns: the present instant.
            lateness_ns: how long after its scheduled instant this cycle began.
        """
        config = self._config
        late = lateness_ns > config.self_lag_cycles * config.cycle_ns
        self._skipped_cycles += max(lateness_ns, 0) // config.cycle_ns
        if late:
            self._on_own_lag(now_ns)
        elif self._judging:
            since_beat_ns = now_ns - max(self._beat_ns, self._blind_ns)
            if since_beat_ns >= config.lost_heartbeats * config.heartbeat_period_ns:
                self._expire(Cause.ALIVE, f"no heartbeat for {since_beat_ns // NS_PER_MS} ms")
            else:
                self._find_faults(now_ns, since_beat_ns)
                self._judge()
        self._events = _NO_CAUSE
        self._event_reason = ""
        return self._result(now_ns, lateness_ns, late)

    def _on_own_lag(self, now_ns: int) -> None:
        """Restart every timer: what seems late may only have been received late."""
        self._lagging = True
        self._blind_ns = now_ns
        self._lost_frames += len(self._pending)
        self._pending.clear()
        self._first_frame_id = self._last_frame_id

    def _find_faults(self, now_ns: int, since_beat_ns: int) -> None:
        config = self._config
        if since_beat_ns >= 2 * config.heartbeat_period_ns:
            self._event(Cause.ALIVE, f"no heartbeat for {since_beat_ns // NS_PER_MS} ms")
        if self._frozen_deadline >= config.frozen_beats:
            self._event(Cause.ALIVE, "the deadline thread stands still")
        if self._frozen_capture >= config.frozen_beats:
            self._event(Cause.ALIVE, "the capture thread stands still")
        if self._beat is not None and self._beat.source_state == SourceState.LOST:
            self._event(Cause.DATA, "the source is lost")
        if self._frame_ns < 0:
            if now_ns - max(self._activated_ns, self._blind_ns) > config.grace_ns:
                self._event(Cause.NOT_RECEIVED, "no frame since activation")
        else:
            silence_ns = now_ns - max(self._frame_ns, self._blind_ns)
            if silence_ns > config.frame_silence_ns:
                self._event(Cause.DATA, f"no frame for {silence_ns // NS_PER_MS} ms")
        if self._pending:
            lost = [frame_id for frame_id, due_ns in self._pending.items() if due_ns <= now_ns]
            for frame_id in lost:
                del self._pending[frame_id]
            if lost:
                self._lose(len(lost))

    def _judge(self) -> None:
        """Debounce this cycle's faults; the firm window holds FAILED without adding to them."""
        causes = self._events
        if causes:
            self._errors += 1
        elif self._errors:
            self._errors -= 1
        if self._errors > self._config.tolerance:
            self._expire(causes, self._event_reason)
            return
        misses = self._window.bit_count()
        if misses > self._config.window_failed:
            self._event(Cause.DEADLINE, f"{misses} misses in {self._window_held} frames")
            causes = self._events
        if causes:
            self._causes = causes
            self._reason = self._event_reason
        if self._errors or causes:
            self._state = State.FAILED
        else:
            self._state = State.OK
            self._causes = _NO_CAUSE
            self._reason = ""

    def _result(self, now_ns: int, lateness_ns: int, late: bool) -> SupervisionResult:
        state, causes, reason = self._state, self._causes, self._reason
        if late:
            causes |= Cause.SELF_LAG
        if self._judging and self._lagging:
            state, causes = State.SELF_LAG, Cause.SELF_LAG
            reason = "the watchdog was late itself and waits for a fresh heartbeat"
        permit = state in (State.OK, State.FAILED) and self._met_stamp_ns >= 0
        if state in (State.OK, State.FAILED) and self._beat is not None and self._beat.degraded:
            causes |= Cause.DEGRADED
            reason = reason or "the detector runs on its fallback backend"
        if state == State.OK and not permit:
            reason = "no frame met yet"
        return SupervisionResult(
            state=state,
            causes=causes,
            permit=permit,
            window_misses=self._window.bit_count(),
            window_length=self._window_held,
            consecutive_misses=self._consecutive,
            last_frame_id=self._last_frame_id,
            worker_session_id=self._beat.session_id if self._beat is not None else 0,
            heartbeat_age_ns=now_ns - self._beat_ns if self._beat is not None else -1,
            last_met_age_ns=now_ns - self._met_stamp_ns if self._met_stamp_ns >= 0 else -1,
            cycle_lateness_ns=lateness_ns,
            skipped_cycles=self._skipped_cycles,
            lost_frames=self._lost_frames,
            epoch_changes=self._epoch_changes,
            reason=reason,
        )
