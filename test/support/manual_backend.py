"""A backend on a manual clock: every step takes what the test says, to the nanosecond."""

from __future__ import annotations

import numpy as np

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.errors import BackendError
from perception_rt.detector.backend import PREPROCESS
from perception_rt.detector.preprocess import letterbox_geometry

NEVER = 10**15


class ManualBackend:
    """Preprocess takes 1 ms, segment k ``durations_ns[k]``; both may be changed between frames.

    Attributes:
        durations_ns: by segment; ``NEVER``: it hangs.
        fault: message that the next finished step of each frame raises; empty: none.
        dead: as of a backend with a sticky error.
        frames: begun so far; rehearsals are among them.
    """

    look_ahead = 0
    double_buffered = False
    letterbox = letterbox_geometry(32, 24, 32, 32)

    def __init__(self, clock, durations_ms=(10, 20, 30), name=0):
        self.clock = clock
        self.durations_ns = [ms * NS_PER_MS for ms in durations_ms]
        self.name = name
        self.fault = ""
        self.dead = False
        self.frames = 0
        self.progress = 0
        self.closed = False
        self.stops = True
        self._spans = {}
        self._free_ns = 0

    @property
    def exit_count(self):
        return len(self.durations_ns)

    def begin(self, image):
        if self._free_ns > self.clock.now():
            raise BackendError("begin while something is in flight")
        if self.dead:
            raise BackendError("the device is lost")
        self.frames += 1
        self._spans = {}
        self._queue(PREPROCESS, NS_PER_MS)

    def launch(self, k):
        assert k - 1 in self._spans
        self._queue(k, self.durations_ns[k])

    def _queue(self, k, duration_ns):
        self.progress += 1
        start_ns = max(self.clock.now(), self._free_ns)
        self._spans[k] = (start_ns, start_ns + duration_ns)
        self._free_ns = start_ns + duration_ns

    def free(self):
        """What hangs has ended."""
        self._free_ns = 0

    def ready(self, k):
        done = k in self._spans and self._spans[k][1] <= self.clock.now()
        if done and self.fault:
            raise BackendError(self.fault)
        return done

    def wait_until(self, t_ns):
        coming = [end for _, end in self._spans.values() if end > self.clock.now()]
        if coming and min(coming) <= t_ns:
            self.clock.advance_to(min(coming))
            return True
        self.clock.advance_to(t_ns)
        return False

    def drain(self, t_ns):
        now_ns = self.clock.now()
        if self._free_ns > now_ns:
            self.clock.advance_to(min(max(t_ns, now_ns), self._free_ns))
        return self._free_ns <= self.clock.now()

    def detections(self, k):
        return np.full((1, 84), self.name, np.float32)

    def span_ns(self, k):
        start_ns, end_ns = self._spans.get(k, (0, 0))
        return (start_ns, end_ns) if 0 < end_ns <= self.clock.now() else (start_ns, 0)

    def previous_end_ns(self):
        return 0

    def close(self, timeout_s=1.0):
        self.closed = True
        return self.stops
