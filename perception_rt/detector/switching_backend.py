"""Two backends of one model behind the protocol of one: a primary, and the fallback that takes
over while the primary fails.

Which one runs a frame is chosen before the frame begins and never changes within it. The one that
stands by is kept warm by rehearsals: a grey image through all segments, a step at most each frame,
never waited for. While the primary is out, the same rehearsals prove it before a frame is given to
it again. A primary that is left with a step in flight keeps running it; its answer is dropped.

Costs the deadline thread a few us a frame, about 20 us where a rehearsal goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.circuit_breaker import BreakerState, CircuitBreaker
from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.errors import BackendError, PerceptionRtError, UsageError
from perception_rt.core.frame import Outcome
from perception_rt.detector.backend import PREPROCESS, Backend
from perception_rt.detector.preprocess import Letterbox

KEEP_WARM_NS = 5 * NS_PER_S
"""Between two rehearsals of a fallback: after 10 s of rest a first run was seen to be slow."""
PROVING_RUNS = 3
"""Rehearsals of the primary before frames go to it; the last one must fit the budget."""
STEP_LIMIT_NS = 2 * NS_PER_S
"""A step of a rehearsal that takes longer never returns."""
_REHEARSAL_IMAGE = (720, 1280, 3)


class Role(IntEnum):
    """Which of the two."""

    PRIMARY = 0
    FALLBACK = 1


class _Rehearsal:
    """A grey image through preprocess and all segments of an idle backend, without waiting."""

    def __init__(self) -> None:
        self._image: NDArray[np.uint8] = np.full(_REHEARSAL_IMAGE, 114, np.uint8)
        self.running = False
        self.fault = ""
        self.first_exit_ns = 0
        self._step = PREPROCESS
        self._since_ns = 0

    def begin(self, backend: Backend, now_ns: int) -> None:
        self.running = True
        self.fault = ""
        self.first_exit_ns = 0
        self._step = PREPROCESS
        self._since_ns = now_ns
        try:
            if backend.drain(now_ns):
                backend.begin(self._image)
            else:
                self._end("a step of an earlier frame never returned")
        except BackendError as error:
            self._end(str(error))

    def go_on(self, backend: Backend, now_ns: int) -> None:
        """Launch what is next as soon as what was before has finished."""
        try:
            while backend.ready(self._step):
                if self._step == 0:
                    self.first_exit_ns = backend.span_ns(0)[1] - backend.span_ns(PREPROCESS)[0]
                if self._step == backend.exit_count - 1:
                    self._end("")
                    return
                self._step += 1
                self._since_ns = now_ns
                backend.launch(self._step)
        except BackendError as error:
            self._end(str(error))
            return
        if now_ns - self._since_ns > STEP_LIMIT_NS:
            name = "preprocess" if self._step == PREPROCESS else f"segment {self._step}"
            self._end(f"{name} did not return within {STEP_LIMIT_NS // NS_PER_S} s")

    def _end(self, fault: str) -> None:
        self.running = False
        self.fault = fault


class SwitchingBackend:
    """A primary and a fallback behind the protocol ``Backend``; see there for what is not
    documented here. Besides, its caller brackets each frame by ``choose`` and ``frame_ended``.

    Args:
        primary, fallback: both warmed up, both of the same model.
        names: of both, for messages.
        breaker: judges the primary.
        reload: makes a primary anew after it reported itself ``dead``; called on a thread of its
            own. None: a dead primary stays away.

    Attributes:
        role: of the next frame.
        switches: times that ``role`` changed.
        standby_fault: what the last rehearsal of the fallback failed of; empty: nothing.

    Raises:
        UsageError: different numbers of exit heads.
    """

    def __init__(
        self,
        primary: Backend,
        fallback: Backend,
        names: tuple[str, str],
        breaker: CircuitBreaker | None = None,
        reload: Callable[[], Backend] | None = None,
    ) -> None:
        if primary.exit_count != fallback.exit_count:
            raise UsageError(
                f"{names[0]} has {primary.exit_count} exit heads, {names[1]} has "
                f"{fallback.exit_count}: both must run the same model"
            )
        self._backends = [primary, fallback]
        self._names = names
        self._breaker = breaker or CircuitBreaker()
        self._reload = reload
        self._reloader: threading.Thread | None = None
        self._reloaded: Backend | str = "not loaded"
        self._current: Backend = primary  # of the present frame
        self._begun = False  # since the last frame_ended
        self._flight_deadline_ns = 0  # of the last frame that began
        self._rehearsal = _Rehearsal()
        self._proving_runs = 0
        self._warm_ns = 0
        self._former_progress = 0
        self.role = Role.PRIMARY
        self.switches = 0
        self.standby_fault = ""

    @property
    def degraded(self) -> bool:
        """Whether the primary is out or on trial."""
        return self._breaker.degraded

    @property
    def reason(self) -> str:
        """Why it is degraded, or what is wrong with the fallback; empty: all is well."""
        if self._breaker.degraded:
            return f"{self._names[Role.PRIMARY]}: {self._breaker.reason}"
        if self.standby_fault:
            return f"fallback {self._names[Role.FALLBACK]}: {self.standby_fault}"
        return ""

    def choose(self, now_ns: int, budget_ns: int) -> bool:
        """Choose the backend of the next frame; to be called before each one. True: another than
        before.

        Args:
            now_ns: the present instant.
            budget_ns: of a frame; the primary's first exit must fit before it is used again.
        """
        self._rehearse(now_ns, budget_ns)
        wanted = Role(self._breaker.state == BreakerState.OPEN)
        if wanted == self.role:
            return False
        fallback = self._backends[Role.FALLBACK]
        if wanted == Role.PRIMARY and not fallback.drain(now_ns):
            return False
        # The next frame begins on the other one, if it fits at all: what the former has not begun
        # is taken back, and it may be rehearsed once it has ended the rest.
        self._current.drain(now_ns)
        self._current = self._backends[wanted]
        self.role = wanted
        self.switches += 1
        self._rehearsal.running = False
        self._warm_ns = now_ns + KEEP_WARM_NS
        return True

    def frame_ended(
        self, outcome: Outcome, deadline_ns: int, now_ns: int, reason: str = "", fits: bool = True
    ) -> None:
        """Judge the primary by a frame that was chosen for.

        A frame that never began is held against it only while it still runs an older one beyond
        that one's deadline, or where its first exit does not fit the budget of a fresh frame: a
        camera that is late or fast is not the backend's fault.

        Args:
            outcome: of the frame.
            deadline_ns: of the frame.
            now_ns: the present instant.
            reason: of FAILED.
            fits: by what was measured, the first exit fits the whole budget.
        """
        primary = self._backends[Role.PRIMARY]
        begun, self._begun = self._begun, False
        if begun:
            self._flight_deadline_ns = deadline_ns
        if (self._current if begun else self._backends[self.role]) is not primary:
            return
        if begun and outcome.met:
            self._breaker.good(now_ns)
        elif outcome == Outcome.FAILED:
            self._breaker.bad(now_ns, reason)
            if getattr(primary, "dead", False):
                self._breaker.trip(now_ns, reason)
        elif begun:
            self._breaker.bad(now_ns, "no first exit in time")
        elif outcome == Outcome.EXPIRED and not fits:
            self._breaker.bad(now_ns, "its first exit does not fit the budget")
        elif now_ns > self._flight_deadline_ns and not primary.drain(now_ns):
            self._breaker.bad(now_ns, "still runs a frame beyond its deadline")

    def _rehearse(self, now_ns: int, budget_ns: int) -> None:
        """Keep the fallback warm, or prove the primary."""
        rehearsal = self._rehearsal
        proving = self._breaker.state == BreakerState.OPEN
        if proving != (self.role == Role.FALLBACK):
            rehearsal.running = False
            return
        standby = self._backends[Role.PRIMARY if proving else Role.FALLBACK]
        if rehearsal.running:
            rehearsal.go_on(standby, now_ns)
            if not rehearsal.running:
                self._rehearsed(now_ns, budget_ns)
        elif proving and self._breaker.probe_due(now_ns):
            if getattr(standby, "dead", False):
                self._bring_back(now_ns)
            elif standby.drain(now_ns):  # it may still run its last frame
                self._proving_runs = 0
                self._start(standby, now_ns, budget_ns)
        elif not proving and self._warm_ns == 0:
            self._warm_ns = now_ns + KEEP_WARM_NS  # it comes warmed up
        elif not proving and now_ns >= self._warm_ns:
            self._start(standby, now_ns, budget_ns)

    def _start(self, standby: Backend, now_ns: int, budget_ns: int) -> None:
        self._rehearsal.begin(standby, now_ns)
        if not self._rehearsal.running:
            self._rehearsed(now_ns, budget_ns)

    def _rehearsed(self, now_ns: int, budget_ns: int) -> None:
        rehearsal = self._rehearsal
        if self._breaker.state != BreakerState.OPEN:
            self._warm_ns = now_ns + KEEP_WARM_NS
            self.standby_fault = rehearsal.fault
        elif rehearsal.fault:
            self._breaker.probed(now_ns, rehearsal.fault)
        else:
            self._proving_runs += 1
            if self._proving_runs < PROVING_RUNS:
                self._start(self._backends[Role.PRIMARY], now_ns, budget_ns)
            elif rehearsal.first_exit_ns > budget_ns:
                took_ms = rehearsal.first_exit_ns // NS_PER_MS
                self._breaker.probed(now_ns, f"its first exit takes {took_ms} ms")
            else:
                self._breaker.probed(now_ns, "")

    def _bring_back(self, now_ns: int) -> None:
        """Load a dead primary again, on a thread of its own; take it over when that has ended."""
        if self._reload is None:
            self._breaker.probed(now_ns, "dead: restart the worker")
            return
        thread = self._reloader
        if thread is None:
            # It does not inherit the deadline thread's policy: SCHED_RESET_ON_FORK is set there.
            self._reloader = threading.Thread(target=self._load, name="reload", daemon=True)
            self._reloader.start()
        elif not thread.is_alive():
            self._reloader = None
            if isinstance(self._reloaded, str):
                self._breaker.probed(now_ns, self._reloaded)
            else:
                self._former_progress += self._backends[Role.PRIMARY].progress
                self._backends[Role.PRIMARY] = self._reloaded

    def _load(self) -> None:
        assert self._reload is not None
        try:
            if self._backends[Role.PRIMARY].close():
                self._reloaded = self._reload()
            else:
                # It still holds the context: a second one beside it would share its error.
                self._reloaded = "does not return from the GPU: restart the worker"
        except PerceptionRtError as error:
            self._reloaded = f"cannot be loaded again: {error}"
        except Exception as error:  # noqa: BLE001 (a driver's error of any kind; the fallback runs on)
            self._reloaded = f"cannot be loaded again: {type(error).__name__}: {error}"

    # --- the protocol ----------------------------------------------------------------------------

    @property
    def exit_count(self) -> int:
        """Number of segments, and so of exit heads."""
        return self._backends[Role.PRIMARY].exit_count

    @property
    def look_ahead(self) -> int:
        """Of the chosen backend."""
        return self._backends[self.role].look_ahead

    @property
    def double_buffered(self) -> bool:
        """Of the chosen backend."""
        return self._backends[self.role].double_buffered

    @property
    def progress(self) -> int:
        """Steps and idle polls of both."""
        return self._former_progress + sum(backend.progress for backend in self._backends)

    @property
    def letterbox(self) -> Letterbox:
        """Of the present frame."""
        return self._current.letterbox

    def begin(self, image: NDArray[np.uint8]) -> None:
        """Start a frame on the chosen backend."""
        self._begun = True
        self._current = self._backends[self.role]
        self._current.begin(image)

    def launch(self, k: int) -> None:
        """Queue segment ``k`` of the present frame."""
        self._current.launch(k)

    def ready(self, k: int) -> bool:
        """True when segment ``k`` of the present frame has finished."""
        return self._current.ready(k)

    def wait_until(self, t_ns: int) -> bool:
        """Sleep until something of the present frame finishes, or until ``t_ns``."""
        return self._current.wait_until(t_ns)

    def drain(self, t_ns: int) -> bool:
        """As ``Backend.drain``, but what an abandoned backend still runs is not waited for.

        It may go on reading the pixels of its last frame; nothing of that is ever published.
        """
        return self._backends[self.role].drain(t_ns)

    def detections(self, k: int) -> NDArray[np.float32]:
        """The detection tensor of exit ``k`` of the present frame."""
        return self._current.detections(k)

    def span_ns(self, k: int) -> tuple[int, int]:
        """Start and end instant of segment ``k`` or PREPROCESS in the present frame."""
        return self._current.span_ns(k)

    def previous_end_ns(self) -> int:
        """When the last launched segment of the frame before the present one ended."""
        return self._current.previous_end_ns()

    def close(self, timeout_s: float = 1.0) -> bool:
        """Stop both; False when one of them did not return in time."""
        if self._reloader is not None:
            self._reloader.join(timeout_s)
            if self._reloader.is_alive():
                return False
            if not isinstance(self._reloaded, str):
                self._backends.append(self._reloaded)
        closed = [backend.close(timeout_s) for backend in self._backends]
        return all(closed)
