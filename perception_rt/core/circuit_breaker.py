"""When to stop trusting a backend, and when to try it again. Pure: every instant is handed in.

CLOSED: it gets every frame. OPEN: it gets none; after a wait it may be probed beside the frames.
HALF_OPEN: a probe went well, so it gets every frame on trial; one that goes wrong opens again.

A breaker that opens again soon waits twice as long as before, up to a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from perception_rt.core.clock import NS_PER_S
from perception_rt.core.errors import UsageError


class BreakerState(IntEnum):
    """State of a circuit breaker."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


@dataclass(frozen=True)
class BreakerConfig:
    """Limits of a breaker. The defaults open it before the watchdog's own, which are 3 misses in a
    row or more than 4 in 20 frames, cost the permit.

    Attributes:
        in_row: opens at so many bad frames in a row.
        in_window: opens at so many bad frames in the window.
        window: frames of the window, at most 64.
        wait_ns: from opening to the first probe.
        wait_most_ns: longest wait.
        trial_frames: good frames on trial that close it.
        calm_ns: closed for so long, it starts from ``wait_ns`` again.

    Raises:
        UsageError: limits out of range.
    """

    in_row: int = 2
    in_window: int = 3
    window: int = 20
    wait_ns: int = NS_PER_S
    wait_most_ns: int = 60 * NS_PER_S
    trial_frames: int = 10
    calm_ns: int = 60 * NS_PER_S

    def __post_init__(self) -> None:
        if min(self.in_row, self.in_window, self.wait_ns, self.trial_frames) < 1:
            raise UsageError("circuit breaker: every limit must be at least 1")
        if self.in_window > self.window or self.window > 64:
            raise UsageError(
                "circuit breaker: in_window <= window <= 64 must hold, got "
                f"{self.in_window}, {self.window}"
            )
        if self.wait_most_ns < self.wait_ns or self.calm_ns < 0:
            raise UsageError(
                f"circuit breaker: wait_most_ns ({self.wait_most_ns}) must be at least wait_ns "
                f"({self.wait_ns}), and calm_ns ({self.calm_ns}) not negative"
            )


class CircuitBreaker:
    """Judges one backend by its frames and probes. All ``now_ns`` are of one monotonic clock.

    Args:
        config: the limits.

    Attributes:
        state: CLOSED, OPEN or HALF_OPEN.
        reason: why it is not CLOSED; empty while it is.
        openings: times it opened.
        retry_ns: earliest instant of the next probe while OPEN.
    """

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self.state = BreakerState.CLOSED
        self.reason = ""
        self.openings = 0
        self.retry_ns = 0
        self._wait_ns = 0  # of the last opening
        self._closed_ns: int | None = None  # None: was never open
        self._in_row = 0
        self._window = 0  # newest frame in bit 0, set for a bad one
        self._trial = 0

    @property
    def degraded(self) -> bool:
        """Whether the backend is not fully trusted: OPEN or on trial."""
        return self.state != BreakerState.CLOSED

    def good(self, now_ns: int) -> None:
        """A frame of the backend was answered. Ignored while OPEN."""
        if self.state == BreakerState.CLOSED:
            self._count(0)
        elif self.state == BreakerState.HALF_OPEN:
            self._trial += 1
            if self._trial >= self._config.trial_frames:
                self.state = BreakerState.CLOSED
                self.reason = ""
                self._closed_ns = now_ns
                self._window = self._in_row = 0

    def bad(self, now_ns: int, reason: str) -> None:
        """A frame of the backend failed or missed. Ignored while OPEN.

        Args:
            now_ns: the present instant.
            reason: what went wrong with this frame.
        """
        config = self._config
        if self.state == BreakerState.HALF_OPEN:
            self._open(now_ns, f"frame {self._trial + 1} on trial: {reason}")
        elif self.state == BreakerState.CLOSED:
            self._count(1)
            in_window = self._window.bit_count()
            if self._in_row >= config.in_row:
                self._open(now_ns, f"{self._in_row} bad frames in a row, last: {reason}")
            elif in_window >= config.in_window:
                self._open(
                    now_ns, f"{in_window} bad frames in the last {config.window}, last: {reason}"
                )

    def trip(self, now_ns: int, reason: str) -> None:
        """Open at once: the backend is known to be unusable. Ignored while OPEN."""
        if self.state != BreakerState.OPEN:
            self._open(now_ns, reason)

    def probe_due(self, now_ns: int) -> bool:
        """Whether a probe may start now."""
        return self.state == BreakerState.OPEN and now_ns >= self.retry_ns

    def probed(self, now_ns: int, fault: str) -> None:
        """A probe ended. Ignored unless OPEN.

        Args:
            now_ns: the present instant.
            fault: what went wrong; empty: nothing, and frames go to the backend on trial.
        """
        if self.state != BreakerState.OPEN:
            return
        if fault:
            self._wait(now_ns, self._wait_ns * 2)
        else:
            self.state = BreakerState.HALF_OPEN
            self._trial = 0

    def _count(self, bad: int) -> None:
        self._in_row = self._in_row + 1 if bad else 0
        self._window = (self._window << 1 | bad) & ((1 << self._config.window) - 1)

    def _open(self, now_ns: int, reason: str) -> None:
        calm = self.state == BreakerState.CLOSED and (
            self._closed_ns is None or now_ns - self._closed_ns >= self._config.calm_ns
        )
        self.state = BreakerState.OPEN
        self.reason = reason
        self.openings += 1
        self._wait(now_ns, self._config.wait_ns if calm else self._wait_ns * 2)

    def _wait(self, now_ns: int, wait_ns: int) -> None:
        self._wait_ns = min(wait_ns, self._config.wait_most_ns)
        self.retry_ns = now_ns + self._wait_ns
