"""What goes wrong in the TensorRT backend, on the stand-in driver: a clear error each time."""

from __future__ import annotations

import gc
import sys
import time

import numpy as np
import pytest
from support import standin_trt
from support.standin_driver import NOTHING_LEFT
from support.tiny_frames import MS, SECOND, answer, finish, frame, grey, wait_for

from perception_rt.core.config import GpuOptions
from perception_rt.core.errors import BackendError, RealtimeError, UnavailableError
from perception_rt.detector.tensorrt_backend import TensorRtBackend

pytestmark = pytest.mark.gpu_checks

ILLEGAL_ADDRESS = 700
LAUNCH_OUT_OF_RESOURCES = 701


def test_steps_launched_out_of_order_are_refused(make):
    backend = make()
    backend.begin(grey(0))
    for k in (1, 3, -1):
        with pytest.raises(BackendError, match=f"segment {k} launched out of order"):
            backend.launch(k)
    backend.launch(0)
    with pytest.raises(BackendError, match="segment 0 launched out of order"):
        backend.launch(0)
    finish(backend, 0)
    assert not backend.wait_until(time.monotonic_ns() + SECOND)  # nothing is in flight


@pytest.mark.parametrize("segment", [0, 1, 2])
def test_a_refused_enqueue_is_a_fault_of_its_frame_only(
    make, driver, trt, without_graphs, segment
):
    backend = make()
    frame(backend, 1)
    trt.refusing = {segment}
    backend.begin(grey(9))
    for k in range(3):
        backend.launch(k)
    with pytest.raises(BackendError, match=f"segment {segment} failed: TensorRT refused"):
        finish(backend, 2)
    assert not backend.ready(segment)
    for k in range(segment):
        np.testing.assert_allclose(backend.detections(k), answer(9, k), atol=1e-4)
    assert not backend.dead
    trt.refusing = set()
    assert backend.drain(time.monotonic_ns() + SECOND)
    np.testing.assert_allclose(frame(backend, 77), answer(77, 2), atol=1e-4)


@pytest.mark.parametrize(
    ("function", "step"),
    [
        ("cuMemcpyHtoDAsync_v2", "preprocess"),
        ("cuLaunchHostFunc", "segment 0"),
        ("cuMemcpyDtoHAsync_v2", "segment 0"),
        ("cuEventRecord", "segment 0"),
        ("cuEventQuery", "segment 0"),
    ],
)
def test_a_passing_driver_error_is_a_fault_of_its_frame_only(
    make, driver, without_graphs, function, step
):
    backend = make()
    frame(backend, 1)
    driver.fail(function, LAUNCH_OUT_OF_RESOURCES)
    backend.begin(grey(9))
    backend.launch(0)
    with pytest.raises(BackendError, match=f"{step} failed"):
        finish(backend, 0)
    assert not backend.dead
    assert backend.drain(time.monotonic_ns() + SECOND)
    np.testing.assert_allclose(frame(backend, 77), answer(77, 2), atol=1e-4)


def test_a_failed_graph_launch_is_a_fault_of_its_frame_only(make, driver):
    backend = make()
    driver.fail("cuGraphLaunch", LAUNCH_OUT_OF_RESOURCES, after=1)
    backend.begin(grey(9))
    backend.launch(0)
    backend.launch(1)
    with pytest.raises(BackendError, match="segment 1 failed: cuGraphLaunch: CUDA_ERROR"):
        finish(backend, 1)
    assert backend.drain(time.monotonic_ns() + SECOND)
    np.testing.assert_allclose(frame(backend, 77), answer(77, 2), atol=1e-4)


def test_nan_is_a_fault_of_its_frame_only(make, trt):
    backend = make()
    trt.raising = {1}
    backend.begin(grey(9))
    for k in range(3):
        backend.launch(k)
    with pytest.raises(BackendError, match="segment 1 failed: NaN or infinity"):
        finish(backend, 2)
    np.testing.assert_allclose(backend.detections(0), answer(9, 0), atol=1e-4)
    trt.raising = set()
    assert backend.drain(time.monotonic_ns() + SECOND)
    np.testing.assert_allclose(frame(backend, 77), answer(77, 2), atol=1e-4)


def test_nan_is_found_though_a_later_segment_was_refused(make, driver, trt, without_graphs):
    driver.manual(0)
    backend = make()
    driver.duration(0, 40 * MS)
    trt.raising, trt.refusing = {0}, {1}
    backend.begin(grey(9))
    backend.launch(0)
    backend.launch(1)
    wait_for(lambda: backend.span_ns(0)[0] and not backend._queue)
    driver.advance(40 * MS)
    with pytest.raises(BackendError, match="segment 0 failed: NaN or infinity"):
        finish(backend, 0)
    assert not backend.ready(0)
    with pytest.raises(BackendError, match="exit 0 has no answer"):
        backend.detections(0)


def test_an_address_that_is_refused_leaves_no_mixture_behind(make, monkeypatch, without_graphs):
    backend = make()
    frame(backend, 1)
    set_address = standin_trt.Context.set_tensor_address
    refused = []

    def refuse_one(self, name, address):
        last = list(self._engine.tensors)[-1]
        if self._engine.segment == 1 and name == last and not refused:
            refused.append(name)
            return False
        return set_address(self, name, address)

    monkeypatch.setattr(standin_trt.Context, "set_tensor_address", refuse_one)
    with pytest.raises(BackendError, match="refused the address of tensor"):
        frame(backend, 50)
    assert backend.drain(time.monotonic_ns() + SECOND)
    for value in (100, 150, 200, 250):
        np.testing.assert_allclose(frame(backend, value), answer(value, 2), atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", ["cuEventQuery", "cuMemcpyHtoDAsync_v2", "cuEventRecord"])
def test_a_sticky_error_kills_the_backend_and_a_new_one_can_be_loaded(
    make, driver, trt, cuda, tiny, function
):
    backend = make()
    frame(backend, 1)
    driver.fail(function, ILLEGAL_ADDRESS, sticky=True)
    backend.begin(grey(9))
    backend.launch(0)
    backend.launch(1)
    with pytest.raises(BackendError, match=r"(preprocess|segment 0) failed"):
        finish(backend, 1)
    assert backend.dead
    assert backend.drain(time.monotonic_ns() + SECOND)
    with pytest.raises(BackendError, match="the GPU was lost"):
        backend.begin(grey(0))
    assert backend.close(10.0)
    gc.collect()
    assert driver.counts().retained_contexts == 0
    left = driver.counts()
    again = make()
    np.testing.assert_allclose(frame(again, 77), answer(77, 2), atol=1e-4)
    assert again.close(10.0)
    # What the broken context held is gone with it; the stand-in cannot free it: it is not counted.
    after = driver.counts()
    assert after.left == left.left
    driver.forgive()


def test_a_segment_that_fails_at_its_first_run_is_named(make, driver, trt, without_graphs):
    trt.refusing = {2}
    with pytest.raises(BackendError, match="first run: segment 2 failed: TensorRT refused"):
        make()


@pytest.mark.parametrize("bad", [b"", b"garbage" * 100, "half"])
@pytest.mark.parametrize("segment", [0, 2])
def test_a_bad_plan_is_refused_with_its_segment(make, driver, tiny, bad, segment):
    plans = [s.read() for s in tiny.segments]
    plans[segment] = plans[segment][: len(plans[segment]) // 2] if bad == "half" else bad
    with pytest.raises(BackendError, match=f"segment {segment}: TensorRT 10.3.0 refused"):
        make(plans=plans)
    gc.collect()
    assert driver.counts().left == NOTHING_LEFT


def test_engines_that_do_not_fit_the_model_are_refused(make, tiny):
    plans = [segment.read() for segment in tiny.segments]
    with pytest.raises(BackendError, match="2 engines for a model of 3 segments"):
        make(plans=plans[:2])
    expected = (
        r"segment 1: tensor 'f1': the model has output float32 \[1, 3, 4, 4\], the engine input"
    )
    with pytest.raises(BackendError, match=expected):
        make(plans=[plans[0], plans[2], plans[2]])


def test_no_execution_context_is_an_error(make, trt):
    trt.contextless = {1}
    with pytest.raises(BackendError, match="segment 1: TensorRT made no execution context"):
        make()


@pytest.mark.parametrize("size", [1000, 20_000, 40_000])
def test_too_little_memory_is_an_error_that_says_so(make, driver, size):
    driver.capacity(size)
    with pytest.raises(BackendError, match="too little free memory"):
        make()


def test_what_is_missing_is_named(make, trt, cuda, tiny, driver, monkeypatch):
    monkeypatch.setattr(trt, "__version__", "8.5.3.1", raising=False)
    with pytest.raises(UnavailableError, match=r"TensorRT 8\.5\.3\.1 is too old, 8\.6"):
        make()
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(UnavailableError, match="tensorrt cannot be imported"):
        TensorRtBackend(tiny, GpuOptions(), [], cuda=cuda)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    with pytest.raises(UnavailableError, match="pycuda cannot be imported"):
        TensorRtBackend(tiny, GpuOptions(), [], trt=trt)


def test_a_driver_without_a_gpu_is_named(make, driver, monkeypatch):
    driver.library.standin_no_device(1)
    try:
        with pytest.raises(UnavailableError, match="the GPU cannot be used"):
            make()
    finally:
        driver.library.standin_no_device(0)


def test_what_thread_init_raises_is_raised(make):
    def refuse():
        raise RealtimeError("SCHED_FIFO refused")

    with pytest.raises(RealtimeError, match="SCHED_FIFO refused"):
        make(thread_init=refuse)


def test_a_cubin_that_does_not_load_is_an_error(make):
    with pytest.raises(BackendError, match=r"CUDA: .*cuModuleLoadDataEx"):
        make(cubin=b"no cubin\0")
