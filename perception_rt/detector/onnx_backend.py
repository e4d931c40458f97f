"""ONNX Runtime on one CPU thread.

One session per segment. Inputs, features and outputs lie in preallocated arrays, bound once by
address: a run copies and allocates nothing on the Python side, and features stay in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from perception_rt.core.clock import Clock
from perception_rt.core.errors import ModelError
from perception_rt.detector.model import MANIFEST, Model, SegmentSpec, TensorSpec
from perception_rt.detector.thread_backend import ThreadBackend

_ORT_TYPES = {"float32": "tensor(float)"}


class OnnxBackend(ThreadBackend):
    """Runs the segments of a model by ONNX Runtime.

    Args:
        model: a checked model; each file is compared with its sha256 once more as it is loaded.
        intra_op_threads: threads of one run. Above 1, ONNX Runtime starts threads of its own,
            with neither the priority nor the core that ``thread_init`` gives this one.
        thread_init: called once on the inference thread before anything else (priority, core).
        clock: CLOCK_MONOTONIC; spans are stamped with it.

    Raises:
        ModelError: a file does not load, or its tensors differ from the manifest.
    """

    def __init__(
        self,
        model: Model,
        intra_op_threads: int = 1,
        thread_init: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(model, thread_init, clock)
        tensors: dict[str, NDArray[np.float32]] = {model.input.tensor.name: self.input}
        # The bound arrays must live as long as the bindings that hold their addresses.
        self._tensors = tensors
        self._runs: list[tuple[Any, Any]] = []
        for segment in model.segments:
            for feature in segment.features:
                tensors[feature.name] = np.zeros(feature.shape, np.float32)
            session = _session(segment, intra_op_threads)
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


def _session(segment: SegmentSpec, intra_op_threads: int) -> Any:
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
        session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelError(
            f"{segment.path}: ONNX Runtime {ort.__version__} cannot load it ({reason}): "
            "export the model again"
        ) from error
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
