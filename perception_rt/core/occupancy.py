"""How long the backend may stay busy with one frame, so that the next ones keep their first exit.
Pure.

Two bounds, both on segments behind the first (the first exit of a frame is never refused by them):

* the frame after the next: whoever waits in the newest-frame slot when it arrives is REPLACED, so
  the backend must be free to take the next frame before that;
* utilisation: the kernel throttles SCHED_FIFO threads above 0.95 of a second, so busy time is
  capped at 0.9 by a token bucket. A segment may be launched while tokens are left, however long
  it takes; what it overdraws is paid back before the next one.
"""

from __future__ import annotations

from perception_rt.core.clock import NS_PER_MS

UTILISATION_CAP = 0.9
BURST_NS = 25 * NS_PER_MS
"""Size of the bucket: busy time that an idle backend saves up."""
_PERIOD_FRAMES = 32
"""Deliveries over which the camera's period is averaged."""


class Occupancy:
    """Bounds on the backend's busy time of one camera.

    Args:
        cap: share of time, above 0 and at most 1.
        burst_ns: busy time that may be saved up, nanoseconds.
    """

    def __init__(self, cap: float = UTILISATION_CAP, burst_ns: int = BURST_NS) -> None:
        self._cap = cap
        self._burst_ns = burst_ns
        self._tokens_ns = burst_ns
        self._refilled_ns: int | None = None
        self._busy_ns: int | None = None
        self._reference: tuple[int, int, int] = (-1, 0, 0)
        self._period_ns = 0
        self._stamp_ns = 0

    @property
    def period_ns(self) -> int:
        """The camera's mean period over its last deliveries, 0 while unknown."""
        return self._period_ns

    def frame(self, frame_id: int, epoch: int, stamp_ns: int) -> None:
        """A frame was taken up: learn the period from delivery numbers, so that gaps do not widen
        it.

        Args:
            frame_id: number of delivery.
            epoch: jumps back of source time so far; another epoch starts anew.
            stamp_ns: capture stamp.
        """
        self._stamp_ns = stamp_ns
        known_epoch, first_id, first_stamp_ns = self._reference
        if epoch != known_epoch:
            self._reference = (epoch, frame_id, stamp_ns)
            return
        if frame_id > first_id and stamp_ns > first_stamp_ns:
            self._period_ns = (stamp_ns - first_stamp_ns) // (frame_id - first_id)
        if frame_id - first_id >= _PERIOD_FRAMES:
            self._reference = (epoch, frame_id, stamp_ns)

    def launched(self, now_ns: int) -> None:
        """The backend got work; no effect while it has some."""
        if self._busy_ns is None:
            self._refill(now_ns)
            self._busy_ns = now_ns

    def idle(self, since_ns: int) -> None:
        """The backend has ended its work at ``since_ns``; no effect while it has none."""
        if self._busy_ns is not None:
            self._tokens_ns -= since_ns - self._busy_ns
            self._busy_ns = None
            self._refill(since_ns)

    def release_by_ns(self, now_ns: int) -> int | None:
        """Instant by which a segment launched now must end to stay within both bounds: ``now_ns``
        when none may be launched, None where nothing bounds it.
        """
        if self._busy_ns is None:
            self._refill(now_ns)
        if self._tokens_ns <= 0:
            return now_ns
        if self._period_ns == 0:
            return None
        return self._stamp_ns + 2 * self._period_ns

    def _refill(self, now_ns: int) -> None:
        if self._refilled_ns is None:
            self._refilled_ns = now_ns
        elif now_ns > self._refilled_ns:
            saved = self._tokens_ns + int(self._cap * (now_ns - self._refilled_ns))
            self._tokens_ns = min(saved, self._burst_ns)
            self._refilled_ns = now_ns
