"""What the deadline thread and the thread that runs a network share, whatever runs it."""

from __future__ import annotations

import threading

from perception_rt.core.errors import BackendError, PerceptionRtError
from perception_rt.core.frame import MAX_SEGMENTS
from perception_rt.detector.backend import PREPROCESS

IDLE_POLL_S = 0.02
"""How often an idle inference thread shows that it is alive."""

NO_FAULT = MAX_SEGMENTS + 1
"""A position in the frame behind every step. Preprocess has position 0, segment k has k + 1."""


class Signal:
    """A binary semaphore for one giver and one waiter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def give(self) -> None:
        """Let the waiter go on, now or when it next waits."""
        # Only the giver releases, so a lock that is taken stays taken until the next line. A lock
        # that is free is a signal the waiter has still to take; it then sees what was done before.
        if self._lock.locked():
            self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a signal is given (True) or ``timeout_s`` is over (False)."""
        return self._lock.acquire(True, timeout_s)


def step_name(step: int) -> str:
    """``preprocess`` or ``segment 3``."""
    return "preprocess" if step == PREPROCESS else f"segment {step}"


def fault_text(step: int, error: Exception) -> str:
    """One line that says which step failed and of what."""
    text = str(error).strip().split("\n", 1)[0]
    if not isinstance(error, PerceptionRtError):
        text = f"{type(error).__name__}: {text}"
    return f"{step_name(step)} failed: {text}"


def fault_of(step: int, error: Exception) -> BackendError:
    """The fault of a frame whose ``step`` raised ``error``."""
    fault = BackendError(fault_text(step, error))
    fault.__cause__ = error
    return fault
