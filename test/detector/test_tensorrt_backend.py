"""The TensorRT backend with the real pycuda, on stand-ins for the driver and for ``tensorrt``.

They check order, threads, errors and leaks. Nothing here says how fast anything is.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.standin_driver import NOTHING_LEFT, preprocess_module
from support.tiny_frames import MS, SECOND, answer, finish, frame, grey, wait_for
from support.tiny_model import SIZE

from perception_rt.core.errors import BackendError
from perception_rt.detector.backend import PREPROCESS

pytestmark = pytest.mark.gpu_checks


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("integrated", [True, False])
def test_every_exit_answers_and_nothing_is_left(
    make, driver, graphs, integrated, request, monkeypatch
):
    if not graphs:
        request.getfixturevalue("without_graphs")
    if integrated:
        driver.integrated()
    backend = make()
    assert backend.exit_count == 3
    assert backend.look_ahead == 1
    assert backend.double_buffered
    assert not backend.dead
    before = driver.counts()
    for value in (0, 51, 102, 204):
        backend.begin(grey(value))
        for k in range(3):
            backend.launch(k)
        for k in range(3):
            finish(backend, k)
            np.testing.assert_allclose(backend.detections(k), answer(value, k), atol=1e-4)
        assert backend.ready(PREPROCESS)
        assert backend.letterbox.new_w == SIZE
        starts, ends = zip(*[backend.span_ns(k) for k in range(-1, 3)])
        assert list(starts) == sorted(starts)
        assert all(start < end for start, end in zip(starts, ends))
        assert all(end <= start for end, start in zip(ends[1:], starts[2:]))
    assert driver.counts().allocations == before.allocations
    assert driver.counts().device_blocks == (2 * 2 if integrated else 2 * (2 + 1 + 3))


def test_describe_says_which_ways_are_used(make, driver, trt, without_graphs):
    text = make().describe()
    assert text.startswith(
        "TensorRT 10.3.0 on stand-in, no GPU (SM 8.7), pinned host memory, copied"
    )
    assert "no CUDA graphs, usual stream priority: cuda-bindings cannot be imported" in text
    assert text.endswith("preprocess on the CPU")


def test_describe_with_graphs_on_an_integrated_gpu(make, driver):
    driver.integrated()
    text = make().describe()
    assert "mapped host memory, CUDA graphs of priority -5" in text


def test_a_segment_that_cannot_be_captured_runs_plainly(make, trt):
    trt.uncapturable = {1}
    backend = make()
    assert "no CUDA graphs, usual stream priority: segment 1 failed" in backend.describe()
    np.testing.assert_allclose(frame(backend, 102), answer(102, 2), atol=1e-4)


@pytest.mark.parametrize("integrated", [True, False])
def test_parity_with_onnx_runtime_on_the_real_model(make, driver, nanodet, integrated):
    from perception_rt.detector.onnx_backend import OnnxBackend

    if integrated:
        driver.integrated()
    image = np.random.default_rng(7).integers(0, 256, (270, 480, 3), np.uint8)
    reference, backend = OnnxBackend(nanodet), make(nanodet)
    try:
        for each in (reference, backend):
            each.begin(image)
            for k in range(each.exit_count):
                each.launch(k)
        for k in range(backend.exit_count):
            finish(reference, k)
            finish(backend, k)
            np.testing.assert_array_equal(backend.detections(k), reference.detections(k))
        assert backend.letterbox == reference.letterbox
    finally:
        reference.close()


def test_a_frame_queues_behind_an_overrun_and_each_keeps_its_own_numbers(make, driver):
    driver.manual(0)
    backend = make()
    driver.duration(1, 40 * MS)
    backend.begin(grey(10))
    backend.launch(0)
    backend.launch(1)
    finish(backend, 0)
    first = backend.detections(0)
    assert backend.span_ns(1)[0] >= backend.span_ns(0)[1] > 0
    assert backend.span_ns(1)[1] == 0
    assert backend.previous_end_ns() == 0
    backend.begin(grey(200))
    backend.launch(0)
    finish(backend, PREPROCESS)
    assert not backend.wait_until(time.monotonic_ns() + 5 * MS)
    assert not backend.ready(0)
    assert backend.previous_end_ns() == 0
    np.testing.assert_allclose(first, answer(10, 0), atol=1e-4)
    with pytest.raises(BackendError, match="in flight"):
        backend.begin(grey(0))
    assert not backend.drain(time.monotonic_ns() + 5 * MS)
    driver.advance(40 * MS)
    finish(backend, 0)
    np.testing.assert_allclose(backend.detections(0), answer(200, 0), atol=1e-4)
    assert 0 < backend.previous_end_ns() <= backend.span_ns(0)[0]
    assert not backend.ready(1)
    assert backend.drain(time.monotonic_ns() + SECOND)


def test_the_gpu_thread_shows_that_it_is_alive_while_idle(make):
    backend = make()
    before = backend.progress
    wait_for(lambda: backend.progress > before + 2)


def test_all_of_cuda_is_called_from_the_gpu_thread(make, driver):
    """The driver refuses and counts calls from a thread that has not pushed the context."""
    threads = []
    backend = make(thread_init=lambda: threads.append(threading.get_ident()))
    assert threads != [threading.get_ident()]
    for value in range(20):
        frame(backend, value)
    counts = driver.counts()
    assert counts.pushed_contexts == 1
    assert counts.retained_contexts == 1
    assert counts.foreign_calls == 0
    assert backend.close(10.0)
    assert driver.counts().pushed_contexts == 0


@pytest.mark.parametrize("integrated", [True, False])
def test_nothing_is_left_by_loading_and_closing_again_and_again(make, driver, integrated):
    if integrated:
        driver.integrated()
    threads = threading.active_count()
    for value in range(30):
        backend = make()
        frame(backend, value, exits=1 + value % 3)
        if value % 2:
            backend.begin(grey(3))  # closed in the middle of a frame
            backend.launch(0)
        assert backend.close(10.0)
        gc.collect()
        assert driver.counts().left == NOTHING_LEFT
    assert threading.active_count() == threads


def test_no_memory_is_taken_on_the_device_while_frames_run(make, driver):
    backend = make()
    before = driver.counts()
    for value in range(100):
        frame(backend, value)
    after = driver.counts()
    assert after.allocations == before.allocations
    assert after.events == before.events


def test_a_device_that_never_answers_is_left_behind(make, driver):
    backend = make()
    driver.duration(0, SECOND)
    backend.begin(grey(0))
    backend.launch(0)
    wait_for(lambda: backend.span_ns(0)[0] > 0 and backend.ready(PREPROCESS))
    assert not backend.drain(time.monotonic_ns() + 5 * MS)
    assert not backend.close(0.05)
    with pytest.raises(BackendError, match="closed"):
        backend.begin(grey(0))


FORGOTTEN = """
import sys
from pathlib import Path
import numpy as np
import pycuda.driver
from support.standin_driver import StandInDriver
from support.standin_trt import StandInTrt
from support.tiny_model import SIZE
from perception_rt.core.config import GpuOptions
from perception_rt.detector.model import load_model
from perception_rt.detector.tensorrt_backend import TensorRtBackend

model = load_model(Path(sys.argv[1]))
plans = [segment.read() for segment in model.segments]
trt = StandInTrt(StandInDriver())
backend = TensorRtBackend(model, GpuOptions(), plans, trt=trt, cuda=pycuda.driver)
backend.begin(np.zeros((SIZE, SIZE, 3), np.uint8))
backend.launch(0)
"""


def test_a_process_that_forgets_to_close_ends_well(driver, tiny, repository):
    """pycuda aborts a process in which a context is still pushed at the end."""
    done = subprocess.run(
        [sys.executable, "-c", FORGOTTEN, str(tiny.directory)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{repository}{os.pathsep}{repository / 'test'}"},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_unstarted_work_is_taken_back(make, driver, monkeypatch):
    backend = make()
    held, reached = threading.Event(), threading.Event()
    begin_step = backend._begin_step

    def hold(network, frame, step):
        if step == PREPROCESS:
            reached.set()
            held.wait(10)
        begin_step(network, frame, step)

    monkeypatch.setattr(backend, "_begin_step", hold)
    backend.begin(grey(0))
    assert reached.wait(10)
    backend.launch(0)
    backend.launch(1)
    assert not backend.drain(time.monotonic_ns())
    assert backend.span_ns(0) == (0, 0)
    held.set()
    assert backend.drain(time.monotonic_ns() + 10 * SECOND)
    assert not backend.ready(0)
    np.testing.assert_allclose(frame(backend, 77), answer(77, 2), atol=1e-4)


# Preprocess on the GPU: the kernel's source, compiled for the host.


@pytest.fixture(scope="module")
def host_module(tmp_path_factory):
    return preprocess_module(tmp_path_factory.mktemp("kernel"))


@pytest.mark.parametrize("integrated", [True, False])
def test_preprocess_on_the_gpu_is_that_of_the_cpu(make, driver, host_module, integrated):
    if integrated:
        driver.integrated()
    backend, reference = make(cubin=host_module), make()
    assert backend.describe().endswith("preprocess on the GPU")
    random = np.random.default_rng(3)
    for height, width in ((24, 48), (64, 40), (50, 100), (20, 20)):
        padded = random.integers(0, 256, (height, width + 5, 3), np.uint8)
        image = padded[:, :width]
        for each in (backend, reference):
            each.begin(image)
            each.launch(0)
            finish(each, 0)
        assert backend.letterbox == reference.letterbox
        np.testing.assert_allclose(
            backend.detections(0), reference.detections(0), atol=1 / 255 + 1e-5
        )
        assert backend.span_ns(PREPROCESS)[1] <= backend.span_ns(0)[0]
