"""The shipped model as TensorRT engines on a real GPU: answers, buffers, cost, latency.

``PERCEPTION_RT_GPU_PRECISIONS`` names the precisions to build (default: fp32 fp16 int8).
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support.gpu_engines import find_tensorrt, pictures

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.config import GpuOptions
from perception_rt.core.errors import BackendError, UnavailableError
from perception_rt.detector.model import load_model
from perception_rt.detector.preprocess import Preprocessor
from perception_rt.latency.stats import quantile_interval

PRECISIONS = os.environ.get("PERCEPTION_RT_GPU_PRECISIONS", "fp32 fp16 int8").split()
MODEL = "nanodet_g_416_coco80"
EXITS = 3

# Largest difference of a score, and of a box side where the score is above 0.3 (pixels). The
# reference is ONNX Runtime: for int8 with the very files that the engines were built from, else
# with the float32 segments.
TOLERANCE = {"fp32": (0.005, 0.25), "fp16": (0.05, 2.0), "int8": (0.15, 6.0)}
FRAMES = 2000


@pytest.fixture(scope="module")
def trt():
    try:
        return find_tensorrt()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def detector(repository):
    return load_model(repository / "models" / MODEL)


@pytest.fixture(scope="module", params=PRECISIONS)
def built(request, trt, detector, repository, tmp_path_factory):
    """Plans and ONNX files of one precision."""
    folder = tmp_path_factory.mktemp(request.param)
    path = [str(repository), str(repository / "test"), os.environ.get("PYTHONPATH", "")]
    script = repository / "test" / "support" / "gpu_engines.py"
    done = subprocess.run(
        [sys.executable, str(script), str(detector.directory), request.param, str(folder)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    segments = range(len(detector.segments))
    return SimpleNamespace(
        precision=request.param,
        plans=[(folder / f"segment_{k}.plan").read_bytes() for k in segments],
        files=[(folder / f"segment_{k}.onnx").read_bytes() for k in segments],
        whole=(folder / "whole.plan").read_bytes(),
        report=json.loads((folder / "built.json").read_text(encoding="utf-8")),
    )


@pytest.fixture
def load(trt, detector, driver):
    """Make TensorRtBackends of engines; closed at the end of the test."""
    try:
        import pycuda.driver  # noqa: F401
    except ImportError as error:
        pytest.skip(f"pycuda is missing: {error}")
    from perception_rt.detector.tensorrt_backend import TensorRtBackend

    backends = []

    def make(plans, **arguments):
        backend = TensorRtBackend(detector, GpuOptions(), plans, trt=trt, **arguments)
        backends.append(backend)
        return backend

    yield make
    while backends:
        assert backends.pop().close(10.0)
    gc.collect()


class Chain:
    """Engines one behind the other on a stream, without the back end."""

    def __init__(self, trt, driver, plans, output_name):
        self._driver = driver
        runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        self._addresses = {}
        self._arrays = {}
        self.outputs = []
        self._contexts = []
        for k, plan in enumerate(plans):
            engine = runtime.deserialize_cuda_engine(plan)
            assert engine is not None, f"engine {k} was refused"
            context = engine.create_execution_context()
            assert context is not None
            for i in range(engine.num_io_tensors):
                name = engine.get_tensor_name(i)
                key = f"{name}_{k}" if name == output_name else name
                shape = tuple(engine.get_tensor_shape(name))
                dtype = np.dtype(trt.nptype(engine.get_tensor_dtype(name)))
                if key not in self._addresses:
                    self._arrays[key] = np.zeros(shape, dtype)
                    self._addresses[key] = driver.allocate(math.prod(shape) * dtype.itemsize)
                if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT:
                    self.outputs.append(key)
                assert context.set_tensor_address(name, self._addresses[key])
            self._contexts.append(context)
        self._stream = ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(self._stream), 1)

    def upload(self, name, array):
        self._driver.upload(self._addresses[name], np.ascontiguousarray(array))

    def poison(self):
        for key in self.outputs:
            self._driver.fill(self._addresses[key], self._arrays[key].nbytes, 0xFF)

    def enqueue(self):
        for context in self._contexts:
            assert context.execute_async_v3(self._stream.value)

    def finish(self):
        self._driver.call("cuStreamSynchronize", self._stream)

    def read(self):
        for key in self.outputs:
            self._driver.download(self._arrays[key], self._addresses[key])
        return {key: self._arrays[key].copy() for key in self.outputs}

    def close(self):
        self._contexts.clear()
        self._driver.call("cuStreamDestroy_v2", self._stream)
        for address in self._addresses.values():
            self._driver.free(address)


@pytest.fixture
def chain(trt, in_context, detector):
    chains = []

    def make(plans):
        chains.append(Chain(trt, in_context, plans, detector.output_name))
        return chains[-1]

    yield make
    for made in chains:
        made.close()
    chains.clear()
    gc.collect()


def reference(detector, files, image):
    """Every exit's detections by ONNX Runtime, [A, 4 + C] each."""
    ort = pytest.importorskip("onnxruntime")
    tensor = np.zeros(detector.input.tensor.shape, np.float32)
    Preprocessor(detector).run(image, tensor)
    values = {detector.input.tensor.name: tensor}
    heads = []
    for segment, file in zip(detector.segments, files):
        session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
        names = [detector.output_name, *(spec.name for spec in segment.features)]
        feed = {spec.name: values[spec.name] for spec in segment.inputs}
        head, *features = session.run(names, feed)
        heads.append(head[0])
        values.update(zip(names[1:], features))
    return heads


def run(backend, image, finish, exits=EXITS):
    backend.begin(image)
    for k in range(exits):
        backend.launch(k)
    finish(backend, exits - 1)


def test_every_head_is_that_of_onnx_runtime(built, load, detector, finish, figure):
    backend = load(built.plans)
    figure(f"{built.precision}, built by", built.report["builder"])
    figure(f"{built.precision}, building, s", sum(built.report["build_s"].values()))
    files = built.files if built.precision == "int8" else [s.read() for s in detector.segments]
    score = [0.0] * EXITS
    side = [0.0] * EXITS
    for image in pictures(4):
        run(backend, image, finish)
        for k, expected in enumerate(reference(detector, files, image)):
            difference = np.abs(backend.detections(k) - expected)
            sure = expected[:, 4:].max(axis=1) > 0.3
            assert sure.any()
            score[k] = max(score[k], float(difference[:, 4:].max()))
            side[k] = max(side[k], float(difference[sure, :4].max()))
    worst_score, worst_side = TOLERANCE[built.precision]
    for k in range(EXITS):
        name = f"{built.precision}, exit {k} against ONNX Runtime"
        figure(f"{name}: score", score[k], worst_score)
        figure(f"{name}: box side, pixels", side[k], worst_side)


def test_every_element_of_an_output_is_written_anew(built, chain, detector):
    runner = chain(built.plans)
    tensor = np.zeros(detector.input.tensor.shape, np.float32)
    Preprocessor(detector).run(pictures(1)[0], tensor)
    runner.upload(detector.input.tensor.name, tensor)
    answers = []
    for _ in range(2):
        runner.poison()
        runner.enqueue()
        runner.finish()
        answers.append(runner.read())
    for key in runner.outputs:
        assert np.isfinite(answers[0][key]).all(), f"{key} was not written wholly"
        np.testing.assert_array_equal(answers[0][key], answers[1][key])


def test_a_plan_that_is_none_is_refused_with_its_segment(built, load):
    for bad in (b"", b"garbage" * 1000, built.plans[1][: len(built.plans[1]) // 2]):
        with pytest.raises(BackendError, match="segment 1"):
            load([built.plans[0], bad, built.plans[2]])


def test_the_chain_costs_little_more_than_one_engine(built, chain, detector, figure):
    tensor = np.zeros(detector.input.tensor.shape, np.float32)
    Preprocessor(detector).run(pictures(1)[0], tensor)
    runners = [chain(built.plans), chain([built.whole])]
    taken = [[], []]
    for runner in runners:
        runner.upload(detector.input.tensor.name, tensor)
    for turn in range(330):  # interleaved, so that both see the same clocks
        for runner, times in zip(runners, taken):
            began = time.perf_counter()
            runner.enqueue()
            runner.finish()
            if turn >= 30:
                times.append((time.perf_counter() - began) * 1e3)
    segments, one = (statistics.median(times) for times in taken)
    figure(f"{built.precision}, three segments: median, ms", segments)
    figure(f"{built.precision}, one engine: median, ms", one)
    figure(f"{built.precision}, segments to one engine", segments / one, 1.15)


def test_enqueueing_returns_before_the_segment_ends(built, chain, detector, figure):
    """On the engines themselves; what other threads do meanwhile is in the part ``backend``."""
    runner = chain(built.plans)
    enqueue, rest = [], []
    for turn in range(220):
        began = time.perf_counter()
        runner.enqueue()
        returned = time.perf_counter()
        runner.finish()
        if turn >= 20:
            enqueue.append((returned - began) * 1e3)
            rest.append((time.perf_counter() - returned) * 1e3)
    name = f"{built.precision}, enqueueing three segments: median, ms"
    figure(name, statistics.median(enqueue), statistics.median(rest))


def test_latency_of_every_exit(built, load, realtime, finish, figure):
    """From begin(image) to the instant at which the exit was seen to be ready."""
    backend = load(built.plans, thread_init=realtime)
    image = pictures(1)[0]
    exits = [[] for _ in range(EXITS)]
    for frame in range(FRAMES + 100):
        began_ns = time.monotonic_ns()
        run(backend, image, finish)
        if frame >= 100:
            for k in range(EXITS):
                exits[k].append(backend.span_ns(k)[1] - began_ns)
    for k in range(EXITS):
        for q in (0.5, 0.99, 0.999):
            result = quantile_interval(exits[k], q)
            value = "not estimable" if result.value is None else result.value / NS_PER_MS
            figure(f"{built.precision}, exit {k}, p{100 * q:g} of {result.n}, ms", value)
