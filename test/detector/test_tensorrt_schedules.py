"""The TensorRT backend at deadlines, in the time of a device whose clock stands still."""

from __future__ import annotations

import numpy as np
import pytest
from support.tiny_frames import MS, SECOND, answer, grey, wait_for

from perception_rt.core.clock import ManualClock
from perception_rt.core.errors import BackendError
from perception_rt.detector.backend import PREPROCESS

pytestmark = pytest.mark.gpu_checks


class Schedule:
    """Frames of random durations, depths and deadlines on a device whose clock stands still.

    What the stand-in tensorrt itself notes when a segment ends is the truth that the backend's
    word is compared with. Up to one segment is launched ahead; a frame may queue behind an older
    one.
    """

    def __init__(self, backend, driver, trt, clock, seed):
        self.backend, self.driver, self.trt, self.clock = backend, driver, trt, clock
        self.random = np.random.default_rng(seed)
        self.value = 0
        self.launches = 0
        self.outcomes = dict.fromkeys((-1, 0, 1, 2), 0)
        self.queued_behind = 0
        trt.completions.clear()

    def in_flight(self):
        return self.launches - len(self.trt.completions)

    def advance(self, until_ns):
        self.clock.advance_to(until_ns)
        self.driver.advance(self.clock.now())

    def launch(self, k):
        records = self.driver.counts().records
        self.driver.duration(k, int(self.random.integers(0, 20)) * MS)
        self.backend.launch(k)
        self.launches += 1
        wait_for(lambda: self.driver.counts().records == records + 1)

    def run(self):
        backend, driver, random = self.backend, self.driver, self.random
        self.value = (self.value + 1) % 256
        behind = self.launches
        self.queued_behind += self.in_flight() > 0
        deadline = self.clock.now() + int(random.integers(1, 40)) * MS
        depth = int(random.integers(1, 4))
        self.begin()
        while not backend.ready(PREPROCESS):
            backend.wait_until(self.clock.now() + SECOND)
        launched = -1
        while True:
            complete = len(self.trt.completions[behind:])
            # The GPU thread sees what is complete, however long the caller's sleep was to be.
            while complete and not backend.ready(complete - 1):
                assert backend.wait_until(self.clock.now() + 10 * SECOND)
            if self.clock.now() >= deadline or complete == depth:
                break
            if launched < depth - 1 and launched < complete + 1:
                launched += 1
                self.launch(launched)
                continue
            self.advance(min(driver.next_end_ns(), deadline))
        self.check(self.trt.completions[behind:], deadline)
        older_drains = len(self.trt.completions) < behind
        if older_drains:
            with pytest.raises(BackendError, match="in flight"):
                backend.begin(grey(0))
        if older_drains or random.random() < 0.4:
            while self.in_flight():
                self.advance(driver.next_end_ns())
            assert backend.drain(self.clock.now() + 10 * SECOND)

    def check(self, completions, deadline):
        """Just what is complete at the deadline is there, and it is this frame's."""
        backend = self.backend
        assert [k for k, _ in completions] == list(range(len(completions)))
        assert all(at <= deadline for _, at in completions)
        deepest = len(completions) - 1
        assert [backend.ready(k) for k in range(3)] == [k <= deepest for k in range(3)]
        for k in range(3):
            if k <= deepest:
                np.testing.assert_allclose(backend.detections(k), answer(self.value, k), atol=1e-4)
            else:
                with pytest.raises(BackendError, match=f"exit {k} has no answer"):
                    backend.detections(k)
        self.outcomes[deepest] += 1

    def begin(self):
        """One set of buffers is free, but the GPU thread may not have seen it yet."""
        while True:
            try:
                self.backend.begin(grey(self.value))
            except BackendError:
                assert self.backend.wait_until(self.clock.now() + 10 * SECOND)
            else:
                break


@pytest.mark.parametrize("graphs", [True, False])
def test_what_is_published_is_the_deepest_exit_complete_at_the_deadline(
    make, driver, trt, graphs, request
):
    """5,000 random schedules each with and without CUDA graphs, in the device's own time."""
    if not graphs:
        request.getfixturevalue("without_graphs")
    driver.manual(0)
    clock = ManualClock()
    backend = make(clock=clock)
    schedule = Schedule(backend, driver, trt, clock, seed=int(graphs))
    for _ in range(5000):
        schedule.run()
    assert min(schedule.outcomes.values()) > 300, schedule.outcomes
    assert schedule.queued_behind > 500
