"""The back end on a real GPU, with segments that only spin: threads, contexts, memory, time.

With pixel value g everywhere, exit k answers g / 255 + k + 1 in every element (see
``support.spin_trt``).
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support import spin_trt
from support.tiny_model import SIZE

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.errors import BackendError, UnavailableError
from perception_rt.detector import gpu_network
from perception_rt.detector.backend import PREPROCESS
from perception_rt.detector.gpu_preprocess import kernel_source
from perception_rt.detector.kernel_compiler import compile_cubin

EXITS = 3
MIB = 2**20


def image(grey):
    return np.full((SIZE, SIZE, 3), grey, np.uint8)


def answer(grey, k):
    return np.float32(grey) / np.float32(255) + np.float32(k + 1)


def run(backend, grey, finish, exits=EXITS):
    """One frame to its end, and what its deepest exit says."""
    backend.begin(image(grey))
    for k in range(exits):
        backend.launch(k)
    finish(backend, exits - 1)
    return backend.detections(exits - 1)


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def quantile(values, q):
    return float(np.quantile(np.array(values), q, method="higher"))


@pytest.fixture
def memory(driver):
    """Free device memory, read with the context current for that long only."""

    def read():
        driver.push(driver.retain())
        try:
            return driver.free_bytes()
        finally:
            driver.pop()
            driver.release()

    return read


@pytest.mark.parametrize("on_gpu", [False, True], ids=["preprocess_cpu", "preprocess_gpu"])
def test_every_exit_has_its_own_answer(start, finish, gpu, figure, on_gpu):
    cubin = None
    if on_gpu:
        cubin = compile_cubin(kernel_source(), "letterbox.cu", gpu.sm, gpu.cuda_major).data
    backend = start(cubin=cubin)
    figure("back end", backend.describe())
    backend.begin(image(51))
    for k in range(EXITS):
        backend.launch(k)
    for k in range(EXITS):
        finish(backend, k)
        np.testing.assert_allclose(backend.detections(k), answer(51, k), rtol=1e-5)
        begin_ns, end_ns = backend.span_ns(k)
        assert 0 < begin_ns < end_ns
    assert backend.ready(PREPROCESS)
    assert backend.letterbox.new_w == SIZE


def test_a_thousand_frames_in_steady_memory(start, finish, memory):
    backend = start()
    for grey in range(50):
        run(backend, grey, finish)
    free, resident = memory(), resident_bytes()
    for frame in range(1000):
        grey = frame % 256
        np.testing.assert_allclose(run(backend, grey, finish), answer(grey, 2), rtol=1e-5)
    assert free - memory() < MIB
    assert resident_bytes() - resident < 8 * MIB


def test_a_thousand_loads_and_closes_in_steady_memory(start, finish, memory, driver, figure):
    """Everything is made, used and released in the thread that owns the context."""
    before = spin_trt.misplaced.loads, spin_trt.misplaced.releases
    threads = threading.active_count()
    free = resident = began = 0.0
    for cycle in range(1000):
        if cycle == 50:
            gc.collect()
            free, resident, began = memory(), resident_bytes(), time.monotonic()
        backend = start()
        np.testing.assert_allclose(run(backend, 102, finish), answer(102, 2), rtol=1e-5)
        assert backend.close(10.0)
        assert driver.current() == 0
    gc.collect()
    figure("load, one frame, close: mean, ms", (time.monotonic() - began) / 950 * 1000)
    assert free - memory() < 4 * MIB
    assert resident_bytes() - resident < 32 * MIB
    assert threading.active_count() == threads
    assert (spin_trt.misplaced.loads, spin_trt.misplaced.releases) == before


def test_every_element_of_an_answer_is_written_anew(start, finish, in_context):
    """The outputs are filled with NaN before each frame."""
    backend = start()
    for frame in range(8):
        for context in list(spin_trt.contexts):
            for address, size in context.output_bytes():
                in_context.fill(address, size, 0xFF)
        for k in range(EXITS):
            np.testing.assert_allclose(
                run(backend, frame * 20, finish, k + 1), answer(frame * 20, k), rtol=1e-5
            )


def test_launching_returns_while_the_segment_runs_and_other_threads_advance(
    start, finish, now, figure
):
    backend = start(spin_ns=50 * NS_PER_MS)
    steps = [0]
    stop = threading.Event()

    def count():
        while not stop.is_set():
            steps[0] += 1

    backend.begin(image(0))
    finish(backend, PREPROCESS)
    counter = threading.Thread(target=count)
    counter.start()
    began_ns, began_steps = now(), steps[0]
    backend.launch(0)
    returned_ns = now()
    finish(backend, 0)
    ended_ns, ended_steps = now(), steps[0]
    stop.set()
    counter.join()
    # The counter holds the GIL for up to 5 ms at a time.
    figure("launch(k) beside a busy Python thread, ms", (returned_ns - began_ns) / NS_PER_MS, 12.0)
    assert ended_ns - began_ns >= 50 * NS_PER_MS
    assert ended_steps - began_steps > 10_000


def test_lateness_of_the_wake_up_behind_a_segment(start, realtime, finish, now, figure):
    """Above the duration of the spin: enqueueing, copying the head back, and noticing it. So the
    figures are upper bounds of the wake-up after the event.
    """
    spin_ns = 3 * NS_PER_MS
    backend = start(spin_ns=spin_ns, thread_init=realtime)
    seen, woken, launched = [], [], []
    for frame in range(600):
        backend.begin(image(frame % 256))
        finish(backend, PREPROCESS)
        began_ns = now()
        backend.launch(0)
        launched.append(now() - began_ns)
        finish(backend, 0)
        woken_ns = now()
        if frame >= 50:
            begin_ns, end_ns = backend.span_ns(0)
            seen.append((end_ns - begin_ns - spin_ns) / NS_PER_MS)
            woken.append((woken_ns - begin_ns - spin_ns) / NS_PER_MS)
        else:
            launched.clear()
    figure("launch(k), p99, ms", quantile(launched, 0.99) / NS_PER_MS)
    figure("behind the spin, GPU thread: p50, ms", quantile(seen, 0.5))
    figure("behind the spin, deadline thread: p50, ms", quantile(woken, 0.5))
    figure("behind the spin, GPU thread: p99, ms", quantile(seen, 0.99), 0.3)
    figure("behind the spin, deadline thread: p99, ms", quantile(woken, 0.99), 0.5)


def test_lateness_of_a_deadline_while_a_segment_runs(start, realtime, finish, now, figure):
    backend = start(spin_ns=15 * NS_PER_MS, thread_init=realtime)
    late = []
    for frame in range(200):
        backend.begin(image(frame))
        finish(backend, PREPROCESS)
        backend.launch(0)
        deadline_ns = now() + 5 * NS_PER_MS
        assert not backend.wait_until(deadline_ns)
        late.append((now() - deadline_ns) / NS_PER_MS)
        assert not backend.ready(0)
        assert backend.drain(now() + NS_PER_S)
    figure("return of wait_until after its instant: p99, ms", quantile(late, 0.99), 1.0)


def test_waiting_takes_little_of_a_core(start, realtime, finish, now, figure):
    others = set(threading.enumerate())
    backend = start(spin_ns=100 * NS_PER_MS, thread_init=realtime)
    own = [thread for thread in threading.enumerate() if thread not in others]
    assert own, "the back end has no thread of its own"
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in own if thread.ident]
    run(backend, 0, finish, 1)
    began_ns, used = now(), [time.clock_gettime_ns(clock) for clock in clocks]
    caller_ns = time.thread_time_ns()
    for _ in range(20):
        run(backend, 0, finish, 1)
    taken_ns = now() - began_ns
    used = [time.clock_gettime_ns(c) - u for c, u in zip(clocks, used)]
    figure("GPU thread while waiting, % of a core", 100 * sum(used) / taken_ns, 5.0)
    share = 100 * (time.thread_time_ns() - caller_ns) / taken_ns
    figure("deadline thread while waiting, % of a core", share, 5.0)


def test_an_overrun_leaves_the_exit_before_it_and_drains_beside_the_next_frame(
    start, model, finish, now
):
    plans = spin_trt.plans(model, NS_PER_MS)
    plans[1] = spin_trt.plan(model, 1, 60 * NS_PER_MS)
    backend = start(plans)
    run(backend, 0, finish, 1)
    for grey in (10, 90, 170, 250):
        backend.begin(image(grey))
        backend.launch(0)
        backend.launch(1)
        deadline_ns = now() + 20 * NS_PER_MS
        while backend.wait_until(deadline_ns):
            pass
        assert backend.ready(0)
        assert not backend.ready(1)
        np.testing.assert_allclose(backend.detections(0), answer(grey, 0), rtol=1e-5)
        # The next frame begins in the other buffers while that segment still runs.
        backend.begin(image(grey + 1))
        backend.launch(0)
        assert not backend.ready(0)
        with pytest.raises(BackendError, match="in flight"):
            backend.begin(image(grey + 2))
        finish(backend, 0)
        assert not backend.ready(1)
        np.testing.assert_allclose(backend.detections(0), answer(grey + 1, 0), rtol=1e-5)
        with pytest.raises(BackendError, match="exit 1"):
            backend.detections(1)
        assert backend.drain(now() + NS_PER_S)


def test_a_plan_that_is_none_is_refused_with_its_segment(start, model, memory):
    good = spin_trt.plans(model)
    free = memory()
    for bad in (b"", b"garbage" * 100, good[1][: len(good[1]) // 2]):
        for k in range(EXITS):
            plans = [bad if i == k else plan for i, plan in enumerate(good)]
            with pytest.raises(BackendError, match=rf"segment {k}"):
                start(plans)
    gc.collect()
    assert free - memory() < MIB


def test_nan_is_a_fault_of_its_frame_only(start, model, finish):
    plans = spin_trt.plans(model)
    plans[1] = spin_trt.plan(model, 1, mode=spin_trt.NAN)
    backend = start(plans)
    for grey in (10, 200, 20, 30, 255, 254, 40):
        backend.begin(image(grey))
        backend.launch(0)
        finish(backend, 0)
        np.testing.assert_allclose(backend.detections(0), answer(grey, 0), rtol=1e-5)
        backend.launch(1)
        if grey > 127:
            with pytest.raises(BackendError, match="NaN or infinity"):
                finish(backend, 1)
        else:
            finish(backend, 1)
            np.testing.assert_allclose(backend.detections(1), answer(grey, 1), rtol=1e-5)
    assert not backend.dead


def test_graphs_cost_no_more_than_plain_launches(start, finish, now, monkeypatch, figure):
    """Short segments, so that the launch shows; turn by turn, so that both see the same clocks."""

    def no_bindings():
        raise UnavailableError("left out for comparison")

    with_graphs = start()
    if "no CUDA graphs" in with_graphs.describe():
        pytest.skip(with_graphs.describe())
    monkeypatch.setattr(gpu_network, "load_bindings", no_bindings)
    plain = start()
    assert "no CUDA graphs" in plain.describe()
    taken = {with_graphs: [], plain: []}
    for turn in range(600):
        for backend, times in taken.items():
            began_ns = now()
            run(backend, turn % 256, finish)
            if turn >= 50:
                times.append((now() - began_ns) / NS_PER_MS)
    graphs, plainly = (statistics.median(times) for times in taken.values())
    figure("a frame of empty segments by graphs: median, ms", graphs)
    figure("the same by plain launches: median, ms", plainly)
    figure("graphs to plain launches", graphs / plainly, 1.05)


BROKEN_CONTEXT = """
import sys, tempfile
from pathlib import Path
import numpy as np
from perception_rt.core.clock import MonotonicClock
from perception_rt.core.config import GpuOptions
from perception_rt.core.errors import PerceptionRtError
from perception_rt.detector.model import load_model
from perception_rt.detector.tensorrt_backend import TensorRtBackend
from support import spin_trt
from support.tiny_model import SIZE, write_tiny_model

now = MonotonicClock().now
with tempfile.TemporaryDirectory() as folder:
    model = load_model(write_tiny_model(Path(folder)))
plans = spin_trt.plans(model)
good = list(plans)
plans[1] = spin_trt.plan(model, 1, mode=spin_trt.TRAP)
backend = TensorRtBackend(model, GpuOptions(), plans, trt=spin_trt)
backend.begin(np.full((SIZE, SIZE, 3), 255, np.uint8))
backend.launch(0)
backend.launch(1)
try:
    limit = now() + 10_000_000_000
    while not backend.ready(1) and now() < limit:
        backend.wait_until(limit)
    print("fault: none")
except PerceptionRtError as error:
    print("fault:", error)
print("dead:", backend.dead)
print("closed:", backend.close(10.0))
try:
    again = TensorRtBackend(model, GpuOptions(), good, trt=spin_trt)
    again.close(10.0)
    print("again: works")
except PerceptionRtError as error:
    print("again: refused,", error)
"""


def test_a_broken_context_is_reported_and_closed_without_a_crash(start, repository, figure):
    """In a process of its own: what a trap leaves of CUDA in a process is not for other tests."""
    path = [str(repository), str(repository / "test"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_CONTEXT],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    # Which one depends on the first call that meets the error.
    assert said["fault"].startswith("segment")
    assert said["dead"] == "True"
    assert said["closed"] == "True"
    figure("loading again after a broken context", said["again"].split(",")[0])
