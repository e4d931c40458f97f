"""Keeps one worker process alive: starts it, notices its death or silence, restarts it a bounded
number of times.

Called from the node's supervision timer; it never blocks there. Instants are CLOCK_MONOTONIC
nanoseconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.config import WorkerConfig
from perception_rt.core.errors import PerceptionRtError, UnavailableError
from perception_rt.runtime.shared_state import WorkerState
from perception_rt.runtime.worker_process import WorkerProcess

SILENCE_NS = 200 * NS_PER_MS
"""A worker whose shared heartbeat is older than this is hung; it writes one each 20 ms."""
STUCK_NS = 2 * NS_PER_S
"""How long the capture thread of an active worker may stand still, and how long a worker that ends
by itself may take: it closes its source and leaves its words first.
"""
BACKOFF_NS = tuple(int(s * NS_PER_S) for s in (0.5, 1.0, 2.0, 4.0))
MAX_RESTARTS, RESTART_WINDOW_NS = 5, 60 * NS_PER_S
ACTIVATE_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 3.0
BUILD_TIMEOUT_S = 3600.0
"""Building the engines of one model on the slowest Jetson, with room."""


class Log(Protocol):
    """The part of a logger that is used."""

    def info(self, message: str) -> Any:
        """Log a normal event."""

    def warning(self, message: str) -> Any:
        """Log something to look at."""

    def error(self, message: str) -> Any:
        """Log a failure."""


class Phase(Enum):
    """What the keeper is doing."""

    RUNNING = "running"
    STARTING = "starting again"
    WAITING = "waiting to start again"
    GIVEN_UP = "given up"


class WorkerKeeper:
    """One worker and its restarts.

    Args:
        config: of the worker.
        log: gets every event with its monotonic time.
        spawn: makes a process for a configuration.
        now: reads CLOCK_MONOTONIC.

    Attributes:
        restarts: since ``start``.
        last_end: why the last worker ended, empty before.
    """

    def __init__(
        self,
        config: WorkerConfig,
        log: Log,
        spawn: Callable[[WorkerConfig], WorkerProcess] = WorkerProcess,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._config = config
        self._changed: dict[str, Any] = {}
        self._log = log
        self._spawn = spawn
        self._now = now
        self._process: WorkerProcess | None = None
        self._activation_count = 0
        self._capture_count = -1
        self._capture_ns = 0  # newest instant at which capture moved, or need not move
        self._stopping_ns = 0  # newest instant at which the worker was not ending
        self._recent: deque[int] = deque()
        self._retry_ns = 0
        self._ready_limit_ns = 0
        self._last_check_ns = 0
        self.phase = Phase.RUNNING
        self.restarts = 0
        self.last_end = ""
        # A slow machine needs long for many runs, but never for ever.
        self.ready_timeout_s = 60.0 + config.warmup_runs

    @property
    def process(self) -> WorkerProcess | None:
        """The present worker, None while there is none."""
        return self._process

    @property
    def max_det(self) -> int:
        """What the worker's buffers are made for."""
        return self._config.max_det

    def start(self, progress: Callable[[int, int], None]) -> None:
        """Start the first worker and wait until it is ready.

        Args:
            progress: called every 10 ms with (warm-up runs done, of how many); may raise to give
                up.

        Raises:
            PerceptionRtError: what ended the worker, in its own words.
        """
        self._process = self._spawn(self._config)
        try:
            self._process.start()
            build_s = BUILD_TIMEOUT_S if self._config.gpu.build_on_configure else 0.0
            self._process.wait_ready(self.ready_timeout_s + build_s, progress)
        except BaseException:
            self._drop(0.0)
            raise
        self._last_check_ns = self._stopping_ns = self._capture_ns = self._now()
        self._log.info(f"worker {self._process.pid} is ready at {self._last_check_ns} ns")

    def activate(self, activation_count: int) -> None:
        """Let frames flow. Refused, it leaves an inactive worker, also after a restart.

        Args:
            activation_count: lifecycle activations so far; a restarted worker keeps it.

        Raises:
            UnavailableError: there is no worker, or it does not follow.
        """
        if self._process is None:
            raise UnavailableError(f"no worker is running, {self.phase.value}: {self.last_end}")
        if self.phase is not Phase.RUNNING:
            raise UnavailableError(
                f"the worker is {self.phase.value}: activate again when it is ready"
            )
        process = self._process
        try:
            _follow(process, activation_count)
        except PerceptionRtError:
            process.state.active = 0
            raise
        self._activation_count = activation_count
        self._last_check_ns = self._now()

    def await_restart(self, progress: Callable[[int, int], None]) -> None:
        """Wait, where a restart is under way, until the worker is ready or was given up.

        Args:
            progress: as in ``start``.
        """
        self.check()  # a worker may have ended since the last one
        limit = time.monotonic() + self.ready_timeout_s + BACKOFF_NS[-1] / NS_PER_S
        while self.phase in (Phase.WAITING, Phase.STARTING) and time.monotonic() < limit:
            state = self._process.state if self._process else None
            progress(state.warmup_done if state else 0, state.warmup_total if state else 0)
            time.sleep(0.01)
            self.check()

    def deactivate(self) -> None:
        """Stop frames; every delivered one has its outcome. A worker that does not follow is
        killed and replaced.
        """
        self._activation_count = 0
        if self._process is None or self.phase is not Phase.RUNNING:
            return
        try:
            self._process.deactivate()
        except PerceptionRtError as error:
            self._ended(str(error))
        self._last_check_ns = self._now()

    def stop(self) -> None:
        """End the worker for good."""
        self._activation_count = 0
        self._drop(STOP_TIMEOUT_S)

    def set_runtime(self, **values: Any) -> None:
        """Pass on what takes effect on the next frame (``WorkerProcess.set_runtime``); kept for a
        restarted worker.
        """
        self._changed.update(values)
        if self._process is not None:
            self._process.set_runtime(**values)

    def check(self) -> None:
        """Look after the worker; to be called every 50 ms or so."""
        now_ns = self._now()
        # After a pause of this process itself nothing is known yet: the worker gets one check to
        # show up.
        paused = now_ns - self._last_check_ns > SILENCE_NS
        self._last_check_ns = now_ns
        if self.phase is Phase.WAITING and now_ns >= self._retry_ns:
            self._restart(now_ns)
        elif self.phase is Phase.STARTING:
            self._check_starting(now_ns)
        elif self.phase is Phase.RUNNING and self._process is not None:
            code = self._process.poll()
            age_ns = now_ns - self._process.state.heartbeat_ns
            if code is not None:
                self._ended(_words(self._process, code))
            elif age_ns > SILENCE_NS and not paused and not self._process.state.stop:
                self._ended(
                    f"worker {self._process.pid} gave no sign of life for "
                    f"{age_ns // NS_PER_MS} ms: killed"
                )
            else:
                self._check_threads(now_ns, paused)

    def _check_threads(self, now_ns: int, paused: bool) -> None:
        """The heartbeat is the deadline thread's; look after the capture thread too."""
        process = self._process
        assert process is not None
        state = process.state
        if not state.stop or paused:
            self._stopping_ns = now_ns
        moved = state.capture_count != self._capture_count
        if moved or paused or state.worker_state != WorkerState.ACTIVE:
            self._capture_count = state.capture_count
            self._capture_ns = now_ns
        limit = f"for more than {STUCK_NS // NS_PER_S} s: killed"
        if now_ns - self._stopping_ns > STUCK_NS:
            self._ended(f"worker {process.pid} lost a thread and has not ended {limit}")
        elif now_ns - self._capture_ns > STUCK_NS:
            self._ended(f"the capture thread of worker {process.pid} stands still {limit}")

    def _check_starting(self, now_ns: int) -> None:
        process = self._process
        assert process is not None
        code = process.poll()
        if code is not None:
            self._ended(_words(process, code))
        elif now_ns > self._ready_limit_ns:
            self._ended(
                f"worker {process.pid} was not ready within {self.ready_timeout_s:g} s: killed"
            )
        elif process.state.worker_state == WorkerState.INACTIVE:
            self.phase = Phase.RUNNING
            self._stopping_ns = self._capture_ns = now_ns
            active = ", active again: no permit until reset" if self._activation_count else ""
            if self._activation_count:
                process.activate(self._activation_count)
            self._log.warning(f"restarted worker {process.pid} is ready at {now_ns} ns{active}")

    def _restart(self, now_ns: int) -> None:
        self._recent.append(now_ns)
        self.restarts += 1
        self.phase = Phase.STARTING
        self._ready_limit_ns = now_ns + int(self.ready_timeout_s * NS_PER_S)
        self._process = self._spawn(self._config)
        try:
            self._process.start()
            self._process.set_runtime(**self._changed)
        except PerceptionRtError as error:
            self._ended(str(error))
            return
        self._log.warning(
            f"worker {self._process.pid} started again at {now_ns} ns "
            f"(restart {len(self._recent)} of at most {MAX_RESTARTS} "
            f"in {RESTART_WINDOW_NS // NS_PER_S} s)"
        )

    def _ended(self, words: str) -> None:
        """The worker is gone or to be killed: plan the next one, or give up."""
        now_ns = self._now()
        self.last_end = words
        self._drop(0.0)
        while self._recent and now_ns - self._recent[0] > RESTART_WINDOW_NS:
            self._recent.popleft()
        if len(self._recent) >= MAX_RESTARTS:
            self.phase = Phase.GIVEN_UP
            self._log.error(
                f"{words} (noticed at {now_ns} ns); given up after {MAX_RESTARTS} restarts in "
                f"{RESTART_WINDOW_NS // NS_PER_S} s: correct the cause, then perception_rt reset"
            )
            return
        delay_ns = BACKOFF_NS[min(len(self._recent), len(BACKOFF_NS) - 1)]
        self.phase = Phase.WAITING
        self._retry_ns = now_ns + delay_ns
        self._log.error(
            f"{words} (noticed at {now_ns} ns); starting another one in {delay_ns / NS_PER_S:g} s"
        )

    def _drop(self, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop(timeout_s)
            process.close()


def _follow(process: WorkerProcess, activation_count: int) -> None:
    """Activate, and wait until the worker is active.

    Raises:
        UnavailableError: it does not follow.
    """
    process.activate(activation_count)
    limit = time.monotonic() + ACTIVATE_TIMEOUT_S
    while process.state.worker_state != WorkerState.ACTIVE:
        if process.poll() is not None or time.monotonic() > limit:
            raise UnavailableError(f"worker {process.pid} did not become active: see its output")
        time.sleep(0.002)


def _words(process: WorkerProcess, code: int) -> str:
    if process.state.worker_state == WorkerState.FAILED:
        return f"worker {process.pid} ended: {process.state.message}"
    how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
    return f"worker {process.pid} {how}"
