"""The two-thread machinery under every backend, with segments that wait for the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.errors import BackendError, RealtimeError
from perception_rt.detector.backend import PREPROCESS, Backend
from perception_rt.detector.model import Model
from perception_rt.detector.preprocess import letterbox_geometry
from perception_rt.detector.thread_backend import ThreadBackend


def far() -> int:
    """An instant that a working test never reaches."""
    return time.monotonic_ns() + 60 * NS_PER_S


def grey(value: int) -> NDArray[np.uint8]:
    return np.full((32, 32, 3), value, np.uint8)


class Gated(ThreadBackend):
    """Segment k ends when the test opens gate k; its answer is the image's grey value."""

    def __init__(self, model: Model, thread_init: Callable[[], None] | None = None) -> None:
        super().__init__(model, thread_init)
        self.entered = [threading.Semaphore(0) for _ in range(3)]
        self.gates = [threading.Semaphore(0) for _ in range(3)]
        self.behaviour: dict[int, Callable[[], None]] = {}
        self.ran: list[tuple[int, int]] = []
        self._start()

    def _run_segment(self, k: int) -> None:
        tag = round(float(self.input.mean()) * 255)
        self.entered[k].release()
        self.gates[k].acquire()
        self.ran.append((tag, k))
        self.outputs[k][...] = tag
        self.behaviour.get(k, lambda: None)()

    def open(self, *segments: int) -> None:
        for k in segments:
            self.gates[k].release()

    def await_end(self) -> None:
        """Return when every launched step has ended, without asking the backend."""
        limit_ns = far()
        while self._ended != self._launched:
            assert time.monotonic_ns() < limit_ns
            threading.Event().wait(0.001)

    def await_entered(self, k: int) -> None:
        assert self.entered[k].acquire(timeout=30)


@pytest.fixture
def gated(tiny: Model) -> Iterator[Gated]:
    backend = Gated(tiny)
    yield backend
    backend.open(*[0, 1, 2] * 10)
    assert backend.close(30)


def wait_for(backend: Backend, k: int) -> None:
    while not backend.ready(k):
        assert backend.wait_until(far())


def test_a_frame_goes_through_all_segments_in_order(gated: Gated) -> None:
    backend: Backend = gated
    assert backend.exit_count == 3
    before_ns = time.monotonic_ns()
    backend.begin(grey(7))
    for k in range(3):
        backend.launch(k)
    assert not backend.ready(0)
    assert [backend.span_ns(k) for k in range(3)] == [(0, 0)] * 3
    gated.open(0, 1, 2)
    wait_for(backend, 2)
    assert all(backend.ready(k) for k in (PREPROCESS, 0, 1, 2))
    assert backend.letterbox == letterbox_geometry(32, 32, 32, 32)
    for k in range(3):
        view = backend.detections(k)
        assert view.shape == (20, 7)
        assert view.dtype == np.float32
        assert (view == 7).all()
    stamps = [t for k in (PREPROCESS, 0, 1, 2) for t in backend.span_ns(k)]
    assert before_ns <= stamps[0]
    assert stamps == sorted(stamps)
    assert stamps[-1] <= time.monotonic_ns()
    assert gated.ran == [(7, 0), (7, 1), (7, 2)]


def test_wait_until_tells_each_end_once(gated: Gated) -> None:
    gated.begin(grey(1))
    assert gated.wait_until(far())  # preprocess
    assert not gated.wait_until(far())  # nothing in flight: at once
    gated.launch(0)
    gated.launch(1)
    gated.open(0)
    assert gated.wait_until(far())
    assert gated.ready(0)
    assert not gated.wait_until(time.monotonic_ns() + NS_PER_MS)  # segment 1 does not end
    assert not gated.wait_until(time.monotonic_ns() - 1)
    gated.open(1)
    assert gated.wait_until(far())
    assert not gated.wait_until(far())


def test_what_ready_told_is_not_told_again(gated: Gated) -> None:
    gated.begin(grey(1))
    wait_for(gated, PREPROCESS)
    gated.launch(0)
    gated.launch(1)
    gated.open(0)
    gated.await_entered(1)  # so segment 0 has ended
    assert gated.ready(0)
    # segment 1 is in flight; nothing has ended that was not told
    assert not gated.wait_until(time.monotonic_ns() + NS_PER_MS)


def test_an_earlier_exit_is_readable_while_a_segment_overruns(gated: Gated) -> None:
    gated.begin(grey(5))
    gated.launch(0)
    gated.launch(1)
    gated.open(0)
    wait_for(gated, 0)
    gated.await_entered(1)
    assert not gated.ready(1)
    assert (gated.detections(0) == 5).all()
    with pytest.raises(BackendError, match="exit 1 has no answer"):
        gated.detections(1)
    with pytest.raises(BackendError, match="still in flight: drain first"):
        gated.begin(grey(6))
    assert not gated.drain(time.monotonic_ns())
    assert (gated.detections(0) == 5).all()
    gated.open(1)
    assert gated.drain(far())
    gated.begin(grey(6))
    assert not gated.ready(0)
    assert not gated.ready(1)
    with pytest.raises(BackendError, match="exit 0 has no answer"):
        gated.detections(0)
    assert [gated.span_ns(k) for k in range(3)] == [(0, 0)] * 3


def test_drain_takes_back_what_has_not_started(gated: Gated) -> None:
    gated.begin(grey(5))
    for k in range(3):
        gated.launch(k)
    gated.await_entered(0)
    assert not gated.drain(time.monotonic_ns())
    gated.open(0)
    assert gated.drain(far())
    assert gated.ready(0)
    assert not gated.ready(1)
    assert gated.ran == [(5, 0)]
    # the frame can go on where it was cut
    gated.launch(1)
    gated.open(1)
    wait_for(gated, 1)
    assert (gated.detections(1) == 5).all()


def test_drain_with_nothing_in_flight_is_true_at_once(gated: Gated) -> None:
    assert gated.drain(0)


def test_segments_are_launched_in_order_and_once(gated: Gated) -> None:
    with pytest.raises(BackendError, match="segment 0 launched out of order"):
        gated.launch(0)  # no frame
    gated.begin(grey(1))
    for wrong in (1, 2, -1, 3):
        with pytest.raises(BackendError, match=f"segment {wrong} launched out of order"):
            gated.launch(wrong)
    gated.launch(0)
    with pytest.raises(BackendError, match="segment 0 launched out of order"):
        gated.launch(0)


def test_the_letterbox_of_another_frame_is_never_given(gated: Gated) -> None:
    with pytest.raises(BackendError, match="letterbox is not known"):
        _ = gated.letterbox
    gated.begin(np.zeros((10, 40, 3), np.uint8))
    wait_for(gated, PREPROCESS)
    assert gated.letterbox == letterbox_geometry(40, 10, 32, 32)
    gated.begin(np.zeros((10, 10, 4), np.uint8))  # no image
    with pytest.raises(BackendError, match="preprocess failed"):
        wait_for(gated, PREPROCESS)
    with pytest.raises(BackendError, match="letterbox is not known"):
        _ = gated.letterbox


def raiser(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("ask", ["ready", "wait_until", "detections"])
def test_a_fault_is_raised_once_and_the_next_frame_works(gated: Gated, ask: str) -> None:
    gated.begin(grey(1))
    for k in range(3):
        gated.launch(k)
    gated.behaviour[1] = raiser(OSError("device lost\nlong trace"))
    gated.open(0, 1)
    gated.await_end()  # every step has ended, unasked
    with pytest.raises(BackendError) as caught:
        {
            "ready": lambda: gated.ready(0),
            "wait_until": lambda: gated.wait_until(far()),
            "detections": lambda: gated.detections(0),
        }[ask]()
    assert str(caught.value) == "segment 1 failed: OSError: device lost"
    assert isinstance(caught.value.__cause__, OSError)
    # once: afterwards the exit before it is there, and the one after it was not run
    assert gated.ready(0)
    assert not gated.ready(1)
    assert not gated.ready(2)
    assert (gated.detections(0) == 1).all()
    assert gated.ran == [(1, 0), (1, 1)]
    assert gated.drain(far())
    gated.behaviour.clear()
    gated.begin(grey(2))
    for k in range(3):
        gated.launch(k)
    gated.open(0, 1, 2)
    wait_for(gated, 2)
    assert (gated.detections(2) == 2).all()


def test_a_fault_nobody_asked_for_does_not_reach_the_next_frame(gated: Gated) -> None:
    gated.begin(grey(1))
    gated.launch(0)
    gated.behaviour[0] = raiser(ValueError("x"))
    gated.open(0)
    gated.await_end()
    gated.begin(grey(2))
    wait_for(gated, PREPROCESS)
    assert not gated.ready(0)


def test_a_launch_after_a_fault_runs_nothing(gated: Gated) -> None:
    gated.begin(grey(1))
    gated.launch(0)
    gated.behaviour[0] = raiser(ValueError("x"))
    gated.open(0)
    with pytest.raises(BackendError, match="segment 0 failed: ValueError: x"):
        wait_for(gated, 0)
    gated.launch(1)
    assert gated.wait_until(far())
    assert not gated.ready(1)
    assert gated.ran == [(1, 0)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 3, 4, 6])
def test_nan_and_infinity_in_an_output_are_a_fault_of_that_frame(
    gated: Gated, value: float, column: int
) -> None:
    def spoil() -> None:
        gated.outputs[1][0, 13, column] = value

    gated.behaviour[1] = spoil
    gated.begin(grey(1))
    gated.launch(0)
    gated.launch(1)
    gated.open(0, 1)
    with pytest.raises(BackendError, match="segment 1 failed: NaN or infinity"):
        wait_for(gated, 1)
    assert (gated.detections(0) == 1).all()
    with pytest.raises(BackendError, match="exit 1 has no answer"):
        gated.detections(1)
    gated.behaviour.clear()
    gated.begin(grey(2))
    gated.launch(0)
    gated.launch(1)
    gated.open(0, 1)
    wait_for(gated, 1)


@pytest.mark.parametrize(
    "image",
    [np.zeros((4, 4), np.uint8), np.zeros((4, 0, 3), np.uint8), np.zeros((4, 4, 3), np.float32)],
)
def test_a_bad_image_is_a_fault_of_that_frame(gated: Gated, image: NDArray[np.uint8]) -> None:
    gated.begin(image)
    gated.launch(0)
    with pytest.raises(BackendError, match="preprocess failed: image"):
        wait_for(gated, 0)
    gated.await_end()
    assert gated.ran == []
    gated.begin(grey(9))
    gated.launch(0)
    gated.open(0)
    wait_for(gated, 0)
    assert (gated.detections(0) == 9).all()


def test_a_segment_that_never_returns_leaves_the_caller_free(tiny: Model) -> None:
    backend = Gated(tiny)
    backend.begin(grey(1))
    wait_for(backend, PREPROCESS)
    backend.launch(0)
    backend.launch(1)
    backend.await_entered(0)
    progress = backend.progress
    assert not backend.ready(0)
    assert not backend.wait_until(time.monotonic_ns() + NS_PER_MS)
    assert not backend.drain(time.monotonic_ns() + NS_PER_MS)
    assert backend.progress == progress
    assert not backend.close(0.01)
    backend.open(0)  # let the thread go
    assert backend.close(30)
    assert backend.ran == [(1, 0)]


def test_progress_grows_with_every_step_and_while_idle(gated: Gated) -> None:
    def await_progress(beyond: int) -> None:
        limit_ns = far()
        while gated.progress <= beyond:
            assert time.monotonic_ns() < limit_ns
            threading.Event().wait(0.005)

    await_progress(gated.progress)
    await_progress(gated.progress + 2)
    gated.begin(grey(1))
    before = gated.progress
    gated.launch(0)
    gated.open(0)
    wait_for(gated, 0)
    await_progress(before)


def test_thread_init_runs_once_on_the_inference_thread_before_all_else(tiny: Model) -> None:
    seen: list[str] = []
    backend = Gated(tiny, lambda: seen.append(threading.current_thread().name))
    with closing(backend):
        assert seen == ["inference"]
        backend.begin(grey(1))
        wait_for(backend, PREPROCESS)
        assert seen == ["inference"]


def test_what_thread_init_raises_reaches_the_constructor(tiny: Model) -> None:
    before = set(threading.enumerate())
    with pytest.raises(RealtimeError, match="SCHED_FIFO refused"):
        Gated(tiny, raiser(RealtimeError("SCHED_FIFO refused")))
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before


def test_a_closed_backend_takes_no_frame_and_closes_again(tiny: Model) -> None:
    backend = Gated(tiny)
    assert backend.close(30)
    assert backend.close(30)
    with pytest.raises(BackendError, match="closed"):
        backend.begin(grey(1))


def test_close_drops_what_has_not_started(tiny: Model) -> None:
    backend = Gated(tiny)
    backend.begin(grey(1))
    backend.launch(0)
    backend.launch(1)
    backend.await_entered(0)
    assert not backend.close(0.001)
    backend.open(0, 1)
    assert backend.close(30)
    assert backend.ran == [(1, 0)]
