"""Schedules as chance has them against the two-thread machinery under every backend."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.errors import BackendError
from perception_rt.detector.model import Model
from perception_rt.detector.thread_backend import ThreadBackend


def grey(value: int) -> NDArray[np.uint8]:
    return np.full((32, 32, 3), value, np.uint8)


class Hasty(ThreadBackend):
    """Segments of random length, some failing; an answer names its frame and segment."""

    def __init__(self, model: Model, seed: int, faults: float = 0.1) -> None:
        super().__init__(model)
        self.faults = faults
        self.random = random.Random(seed)
        self.failures: set[int] = set()
        self._start()

    def _run_segment(self, k: int) -> None:
        tag = round(float(self.input.mean()) * 255)
        kind = self.random.random()
        if kind < 0.3:
            time.sleep(self.random.random() * 0.001)  # the work itself
        self.outputs[k].fill(0)
        if kind < self.faults:
            self.failures.add(tag)
            raise ValueError(tag)
        self.outputs[k].fill(tag * 4 + k)


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads change over as often as they can, so that every gap between two lines is tried."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def begin_when_free(backend: Hasty, tag: int, rng: random.Random) -> int:
    """Begin a frame, draining as long as the one before is in flight; returns the drains."""
    drains = 0
    while True:
        try:
            backend.begin(grey(tag))
            return drains
        except BackendError as error:
            assert "drain first" in str(error)  # noqa: PT017
            drains += 1
            backend.drain(time.monotonic_ns() + rng.choice([0, NS_PER_MS, NS_PER_S]))


def play_frame(backend: Hasty, tag: int, rng: random.Random) -> int:
    """Launch, poll and wait as chance has it; check each answer; returns how many there were."""
    depth = rng.randint(0, 3)
    until_ns = time.monotonic_ns() + rng.choice([0, NS_PER_MS // 4, 60 * NS_PER_S])
    launched = finished = -1
    while True:
        while finished < launched and backend.ready(finished + 1):
            finished += 1
        if finished == depth - 1:
            break
        if launched < depth - 1 and (launched == finished or rng.random() < 0.5):
            launched += 1
            backend.launch(launched)
        elif not backend.wait_until(until_ns):
            assert time.monotonic_ns() >= until_ns, "nothing in flight, and yet not finished"
            break
    for k in range(finished + 1):
        assert (backend.detections(k) == tag * 4 + k).all()
        start_ns, end_ns = backend.span_ns(k)
        assert 0 < start_ns <= end_ns
    return finished + 1


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_gives_a_stale_or_lost_answer(tiny: Model, seed: int) -> None:
    """Random launches, polls, waits, overruns and drains, as fast as they go."""
    rng = random.Random(seed)
    answers = faults = drains = 0
    with closing(Hasty(tiny, seed)) as backend:
        for number in range(400):
            tag = number % 256
            drains += begin_when_free(backend, tag, rng)
            backend.failures.discard(tag)
            try:
                answers += play_frame(backend, tag, rng)
            except BackendError as error:
                assert f"ValueError: {tag}" in str(error)  # noqa: PT017
                assert tag in backend.failures
                faults += 1
            if rng.random() < 0.5:
                backend.drain(time.monotonic_ns() + rng.choice([0, NS_PER_S]))
    assert answers > 100
    assert faults > 10
    assert drains > 5


@pytest.mark.usefixtures("switching")
def test_a_frame_that_is_ready_is_not_in_flight(tiny: Model) -> None:
    """However soon after ``ready`` the next frame begins."""
    with closing(Hasty(tiny, 0, faults=0)) as backend:
        for number in range(1000):
            tag = number % 256
            backend.begin(grey(tag))
            backend.launch(0)
            while not backend.ready(0):
                assert backend.wait_until(time.monotonic_ns() + 60 * NS_PER_S)
            assert backend.detections(0)[0, 0] == tag * 4
