"""The recorded schedule of a bag or video, laid on CLOCK_MONOTONIC."""

from __future__ import annotations

import time
from collections.abc import Callable

from perception_rt.core.clock import NS_PER_S


class Pacer:
    """Turns offsets within a recording into instants, and sleeps until them.

    The schedule never moves because the player was late: lateness shows as age.

    Args:
        rate: speed of play, 1.0 is as recorded.
        now: reads CLOCK_MONOTONIC, nanoseconds.
        sleep: sleeps for so many seconds.
    """

    def __init__(
        self,
        rate: float,
        now: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._sleep = sleep
        self._lap_start_ns = 0
        self.now = now

    def scaled_ns(self, ns: int) -> int:
        """A recorded duration at the speed of play."""
        return ns if self._rate == 1.0 else round(ns / self._rate)

    def start(self, start_ns: int) -> None:
        """Lay offset 0 on ``start_ns``."""
        self._lap_start_ns = start_ns

    def next_lap(self, length_ns: int) -> None:
        """Lay offset 0 a recorded ``length_ns`` later than in the lap before."""
        self._lap_start_ns += self.scaled_ns(length_ns)

    def due_ns(self, offset_ns: int) -> int:
        """The instant at which the frame at a recorded ``offset_ns`` is due in this lap."""
        return self._lap_start_ns + self.scaled_ns(offset_ns)

    def wait(self, due_ns: int, until_ns: int) -> bool:
        """Sleep until ``due_ns`` (True), or until ``until_ns`` where that comes first (False)."""
        while True:
            now_ns = self.now()
            if now_ns >= due_ns:
                return True
            if now_ns >= until_ns:
                return False
            self._sleep((min(due_ns, until_ns) - now_ns) / NS_PER_S)
