"""Clocks: integer nanoseconds, always injected.

Deadlines live on CLOCK_MONOTONIC. CLOCK_REALTIME is only ever related to it by a bracketed
offset, because PTP and NTP slew it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


class Clock(Protocol):
    """Source of the present instant."""

    def now(self) -> int:
        """The present instant in nanoseconds."""


class MonotonicClock:
    """CLOCK_MONOTONIC of this machine."""

    now = staticmethod(time.monotonic_ns)


class ManualClock:
    """A clock that stands still until it is told to move: for tests and simulations.

    Args:
        now_ns: first instant, nanoseconds.
    """

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now(self) -> int:
        """The present instant in nanoseconds."""
        return self._now_ns

    def advance(self, ns: int) -> None:
        """Move forward by ``ns`` nanoseconds; a monotonic clock never goes back.

        Raises:
            ValueError: ``ns`` is negative.
        """
        if ns < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-ns} ns")
        self._now_ns += ns

    def advance_to(self, now_ns: int) -> None:
        """Move forward to ``now_ns``; an instant already past leaves the clock where it is."""
        self._now_ns = max(self._now_ns, now_ns)


class ClockOffset(NamedTuple):
    """CLOCK_REALTIME minus CLOCK_MONOTONIC, and half the width of the bracket it was read in."""

    offset_ns: int
    error_ns: int


def read_clock_offset(
    monotonic: Callable[[], int] = time.monotonic_ns,
    realtime: Callable[[], int] = time.time_ns,
    attempts: int = 3,
) -> ClockOffset:
    """Read the offset between the two clocks by the narrowest of ``attempts`` brackets.

    The realtime clock is read between two monotonic reads; it was read somewhere inside that
    bracket, so the error is at most half its width.

    Args:
        monotonic: reads CLOCK_MONOTONIC, nanoseconds.
        realtime: reads CLOCK_REALTIME, nanoseconds.
        attempts: brackets tried, at least 1.
    """
    best = ClockOffset(0, -1)
    for _ in range(attempts):
        before = monotonic()
        real = realtime()
        after = monotonic()
        error = (after - before + 1) // 2
        if best.error_ns < 0 or error < best.error_ns:
            best = ClockOffset(real - (before + after) // 2, error)
    return best
