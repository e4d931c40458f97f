"""ONNX Runtime on one thread: on the CPU, or by its CUDA or TensorRT provider.

One session per segment. Inputs, features and outputs lie in preallocated arrays of the host, bound
once by address: a run copies and allocates nothing on the Python side, and features stay in place.
A provider on a GPU copies what a segment reads and writes; ``tensorrt_backend`` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from perception_rt.core.clock import Clock
from perception_rt.core.config import GpuOptions
from perception_rt.core.errors import ModelError, UnavailableError, UsageError
from perception_rt.detector.model import MANIFEST, Model, SegmentSpec, TensorSpec
from perception_rt.detector.thread_backend import ThreadBackend

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"

_ORT_TYPES = {"float32": "tensor(float)"}
_Providers = list[tuple[str, dict[str, Any]]]


class OnnxBackend(ThreadBackend):
    """Runs the segments of a model by ONNX Runtime.

    Args:
        model: a checked model; each file is compared with its sha256 once more as it is loaded.
        intra_op_threads: threads of one run. Above 1, ONNX Runtime starts threads of its own,
            with neither the priority nor the core that ``thread_init`` gives this one.
        thread_init: called once on the inference thread before anything else (priority, core).
        clock: CLOCK_MONOTONIC; spans are stamped with it.
        provider: ``CPU``, ``CUDA`` or ``TENSORRT``; a node that a provider on a GPU cannot run
            is run by the CPU.
        gpu: precision and engine cache of ``TENSORRT``, which builds its engines here when the
            cache has none: minutes.

    Raises:
        UnavailableError: this ONNX Runtime does not have the provider, or cannot start it here.
        UsageError: the provider has no such option.
        ModelError: a file does not load, or its tensors differ from the manifest.
    """

    def __init__(
        self,
        model: Model,
        intra_op_threads: int = 1,
        thread_init: Callable[[], None] | None = None,
        clock: Clock | None = None,
        provider: str = CPU,
        gpu: GpuOptions | None = None,
    ) -> None:
        super().__init__(model, thread_init, clock)
        providers = _providers(provider, gpu or GpuOptions())
        tensors: dict[str, NDArray[np.float32]] = {model.input.tensor.name: self.input}
        # The bound arrays must live as long as the bindings that hold their addresses.
        self._tensors = tensors
        self._runs: list[tuple[Any, Any]] = []
        for segment in model.segments:
            for feature in segment.features:
                tensors[feature.name] = np.zeros(feature.shape, np.float32)
            session = _session(segment, intra_op_threads, providers)
            binding = session.io_binding()
            for spec in segment.inputs:
                array = tensors[spec.name]
                binding.bind_input(spec.name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
            for spec in (segment.output, *segment.features):
                array = (
                    self.outputs[segment.index] if spec is segment.output else tensors[spec.name]
                )
                binding.bind_output(
                    spec.name, "cpu", 0, np.float32, array.shape, array.ctypes.data
                )
            self._runs.append((session.run_with_iobinding, binding))
        self._start()

    def _run_segment(self, k: int) -> None:
        run, binding = self._runs[k]
        run(binding)


def _providers(provider: str, gpu: GpuOptions) -> _Providers:
    """The provider and those behind it, with their options."""
    cpu: _Providers = [(CPU, {})]
    if provider == CPU:
        return cpu
    available = ort.get_available_providers()
    if provider not in available:
        raise UnavailableError(
            f"ONNX Runtime {ort.__version__} has no {provider}, only {', '.join(available)}: "
            "install onnxruntime-gpu in its place, or choose another backend"
        )
    if gpu.dla_core >= 0:
        raise UsageError(
            f"dla_core {gpu.dla_core} is not offered through ONNX Runtime: use backend 'tensorrt'"
        )
    if provider == CUDA:
        if gpu.precision not in ("auto", "fp32"):
            raise UsageError(
                f"precision {gpu.precision} is not offered by {CUDA}: use backend 'tensorrt', or "
                "precision auto"
            )
        return [(CUDA, {}), *cpu]
    options: dict[str, Any] = {
        "trt_fp16_enable": gpu.precision == "fp16",
        "trt_int8_enable": gpu.precision == "int8",
    }
    if gpu.engine_cache_dir:
        options["trt_engine_cache_enable"] = True
        options["trt_engine_cache_path"] = gpu.engine_cache_dir
    return [(TENSORRT, options), *([(CUDA, {})] if CUDA in available else []), *cpu]


def _session(segment: SegmentSpec, intra_op_threads: int, providers: _Providers) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = intra_op_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    # Spinning burns the cores that other threads need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    data = segment.read()
    try:
        session = ort.InferenceSession(data, options, providers=providers)
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelError(
            f"{segment.path}: ONNX Runtime {ort.__version__} cannot load it ({reason}): "
            "export the model again"
        ) from error
    # Where a provider's libraries do not load, ONNX Runtime warns and goes on without it.
    asked, started = providers[0][0], session.get_providers()
    if asked not in started:
        raise UnavailableError(
            f"ONNX Runtime {ort.__version__} has {asked} but could not start it, only "
            f"{', '.join(started)}: check this machine's driver, CUDA, cuDNN and TensorRT against "
            "its release notes"
        )
    _compare(segment, "input", session.get_inputs(), segment.inputs)
    _compare(segment, "output", session.get_outputs(), (segment.output, *segment.features))
    return session


def _compare(
    segment: SegmentSpec, kind: str, found: list[Any], expected: tuple[TensorSpec, ...]
) -> None:
    """Refuse a file whose tensors differ from the manifest by name, shape or type."""
    have = {node.name: f"{node.type} {list(node.shape)}" for node in found}
    want = {spec.name: f"{_ORT_TYPES[spec.dtype]} {list(spec.shape)}" for spec in expected}
    for name in sorted(have.keys() | want.keys()):
        expected_form, found_form = want.get(name, "none"), have.get(name, "none")
        if found_form != expected_form:
            raise ModelError(
                f"{segment.path}: {kind} '{name}': expected {expected_form} by {MANIFEST}, "
                f"found {found_form}: export the model again"
            )
