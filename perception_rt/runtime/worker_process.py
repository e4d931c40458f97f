"""The parent's side of a worker: start it, wait for it, steer it, stop it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable

from perception_rt.core.config import WorkerConfig
from perception_rt.core.errors import (
    BackendError,
    InputError,
    PerceptionRtError,
    RealtimeError,
    UnavailableError,
    UsageError,
)
from perception_rt.runtime.shared_state import SharedState, WorkerState

_POLL_S = 0.01
_ERRORS: dict[int, type[PerceptionRtError]] = {
    cls.exit_code: cls
    for cls in (UsageError, InputError, UnavailableError, BackendError, RealtimeError)
}


class WorkerProcess:
    """One spawned worker. Start it from the main thread: it dies with the thread that started it.

    Args:
        config: ``state_fd`` is filled in here; ``record_fd`` is passed on when set.
        module: what ``python -m`` runs.

    Attributes:
        state: shared with the worker; read its counters here.
    """

    def __init__(
        self, config: WorkerConfig, module: str = "perception_rt.ros.worker_main"
    ) -> None:
        self.state = SharedState.create()
        self.config = dataclasses.replace(config, state_fd=self.state.fd)
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        state = self.state
        state.budget_ns = config.budget_ns
        state.confidence_threshold = config.confidence_threshold
        state.nms_threshold = config.nms_threshold
        state.max_det = config.max_det
        state.frame_skip = int(config.frame_skip)

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Spawn the worker; returns at once.

        Raises:
            UnavailableError: the process cannot be started.
        """
        fds = [self.config.state_fd]
        if self.config.record_fd >= 0:
            fds.append(self.config.record_fd)
        environment = dict(os.environ, PERCEPTION_RT_PARENT_PID=str(os.getpid()))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                pass_fds=fds,
                env=environment,
                text=True,
            )
            assert self._process.stdin is not None
            self._process.stdin.write(self.config.to_json())
            self._process.stdin.close()
        except OSError as error:
            raise UnavailableError(
                f"worker process cannot be started: {error}: check memory and limits"
            ) from error

    def poll(self) -> int | None:
        """Exit status of the worker, negative for a signal, or None while it runs."""
        return self._process.poll() if self._process else None

    def wait_ready(
        self, timeout_s: float, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Wait until the worker has loaded its model and warmed up.

        Args:
            timeout_s: seconds.
            progress: called with (warm-up runs done, of how many).

        Raises:
            PerceptionRtError: what ended the worker, in its own words.
            UnavailableError: not ready in time.
        """
        self._wait_for(WorkerState.INACTIVE, timeout_s, "get ready", progress)

    def activate(self, activation_count: int = 1) -> None:
        """Let frames flow; takes effect within 20 ms."""
        self.state.activation_count = activation_count
        self.state.active = 1

    def deactivate(self, timeout_s: float = 3.0) -> None:
        """Stop delivering and wait until every delivered frame has its outcome.

        Raises:
            UnavailableError: not inactive in time.
        """
        self.state.active = 0
        self._wait_for(WorkerState.INACTIVE, timeout_s, "become inactive", None)

    def set_runtime(
        self,
        budget_ns: int | None = None,
        confidence_threshold: float | None = None,
        nms_threshold: float | None = None,
        max_det: int | None = None,
        frame_skip: bool | None = None,
    ) -> None:
        """Change what may change while frames flow; the next frame has it. A restart keeps it."""
        changes = {
            "budget_ns": budget_ns,
            "confidence_threshold": confidence_threshold,
            "nms_threshold": nms_threshold,
            "max_det": max_det,
            "frame_skip": frame_skip,
        }
        given = {name: value for name, value in changes.items() if value is not None}
        self.config = dataclasses.replace(self.config, **given)  # type: ignore[arg-type]
        state = self.state
        state.command_seq += 1
        state.budget_ns = self.config.budget_ns
        state.confidence_threshold = self.config.confidence_threshold
        state.nms_threshold = self.config.nms_threshold
        state.max_det = self.config.max_det
        state.frame_skip = int(self.config.frame_skip)
        state.command_seq += 1

    def stop(self, timeout_s: float = 5.0) -> int:
        """End the worker: by its own stop, by SIGKILL when it does not follow. Its exit status."""
        if self._process is None:
            return 0
        self.state.stop = 1
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """Stop, and free the shared state."""
        self.stop()
        self.state.close()

    def _wait_for(
        self,
        wanted: WorkerState,
        timeout_s: float,
        verb: str,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        state = self.state
        limit = time.monotonic() + timeout_s
        while True:
            code = self.poll()  # first: a dead worker's last state says nothing
            if code is not None:
                raise self._end_error(code)
            if state.worker_state == wanted:
                return
            if time.monotonic() > limit:
                raise UnavailableError(
                    f"worker {self.pid} did not {verb} within {timeout_s:g} s: see its output"
                )
            if progress is not None:
                progress(state.warmup_done, state.warmup_total)
            time.sleep(_POLL_S)

    def _end_error(self, code: int) -> PerceptionRtError:
        """Why a worker that ended with ``code`` (from ``poll``) ended: its own words where it left
        some.
        """
        if self.state.worker_state == WorkerState.FAILED:
            return _ERRORS.get(self.state.error_code, PerceptionRtError)(self.state.message)
        if code < 0:
            return UnavailableError(
                f"worker {self.pid} was ended by signal {-code}: see the system log"
            )
        kind = _ERRORS.get(code, UnavailableError)
        return kind(f"worker {self.pid} ended with status {code}: see its output")
