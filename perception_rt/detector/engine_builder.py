"""One segment's ONNX file to one TensorRT engine.

Written against the names that TensorRT 8.6 to 11.4 share, and tried with tensorrt_rtx on a CPU:
the module is passed in. Precision lives in the file: networks are strongly typed where the version
can (10 and later), so FP16 and INT8 come from its casts and Q/DQ nodes (``precision.py``); 8.6 is
given the FP16 and INT8 flags besides, and may then choose the faster type per layer.

TensorRT keeps one logger per process, the first one it meets. Building wants the messages, running
wants no Python in its way: build in a process of its own, as ``perception_rt model build`` is.
"""

from __future__ import annotations

import importlib
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from perception_rt.core.errors import BackendError, ModelError, UnavailableError, UsageError
from perception_rt.detector.jetpack import dla_refusal, tensorrt_refusal

Progress = Callable[[str, int, int], None]
"""What is going on, steps done, steps in all."""

WORKSPACE_BYTES = 1 << 30
OPTIMIZATION_LEVEL = 3
QUANTIZED = "int8"

_MAX_ERRORS_SHOWN = 3
_ENGINE_MB = 1_000_000


@dataclass(frozen=True)
class BuildOptions:
    """How to build.

    Attributes:
        precision: ``fp32``, ``fp16`` or ``int8``: what the ONNX file was prepared for.
        dla_core: deep learning accelerator, -1: the GPU.
        workspace_bytes: scratch memory that the builder and a layer may take.
        optimization_level: 0 (quick build) to 5 (slow build).
        timing_cache: of an earlier build on this GPU; empty: none.
    """

    precision: str = "fp32"
    dla_core: int = -1
    workspace_bytes: int = WORKSPACE_BYTES
    optimization_level: int = OPTIMIZATION_LEVEL
    timing_cache: bytes = field(default=b"", repr=False)

    @property
    def text(self) -> str:
        """What of it decides whether an engine fits."""
        return (
            f"{self.precision} dla={self.dla_core} workspace={self.workspace_bytes} "
            f"level={self.optimization_level}"
        )


@dataclass(frozen=True)
class TensorForm:
    """An input or output: name, shape and TensorRT's name of its type (``FLOAT``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and what is known of it.

    Attributes:
        plan: the serialised engine.
        inputs, outputs: its tensors.
        layer_types: layers by the type of their first output, as the network states them; exact
            where networks are strongly typed, a wish on 8.6.
        strongly_typed: whether they are.
        timing_cache: to be kept for the next build; empty where the module has none.
        warnings: the builder's, first line each.
        build_ns: how long it took.
    """

    plan: bytes = field(repr=False)
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    layer_types: dict[str, int]
    strongly_typed: bool
    timing_cache: bytes = field(repr=False)
    warnings: tuple[str, ...]
    build_ns: int


def import_tensorrt() -> Any:
    """The tensorrt module of this machine.

    Raises:
        UnavailableError: not installed, does not load, or a version that is not supported.
    """
    try:
        trt = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "tensorrt is not installed for this Python: on Jetson `apt install "
            "python3-libnvinfer` and a venv with --system-site-packages, elsewhere `pip install "
            "tensorrt`; or use backend onnxruntime"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise UnavailableError(
            f"tensorrt does not load ({_first_line(str(error))}): its Python package and "
            "libnvinfer must be of one version; or use backend onnxruntime"
        ) from error
    refusal = tensorrt_refusal(str(getattr(trt, "__version__", "")))
    if refusal:
        raise UnavailableError(refusal)
    return trt


def builder_name(trt: Any) -> str:
    """Name and version of what builds, for the cache's key: ``tensorrt 10.3.0``."""
    return f"{trt.__name__} {trt.__version__}"


def build_segment(
    trt: Any,
    onnx_bytes: bytes,
    options: BuildOptions,
    progress: Progress | None = None,
    name: str = "the ONNX file",
) -> BuiltEngine:
    """Build one engine; takes seconds to minutes, releases the GIL.

    Args:
        trt: the module ``tensorrt``, or one with its names.
        onnx_bytes: the segment, prepared for ``options.precision``.
        options: how to build.
        progress: told of the phases (TensorRT 10 and later; before, only of begin and end).
        name: of the file, for messages.

    Raises:
        ModelError: not an ONNX file, an operator that TensorRT lacks (names op and node), dynamic
            shapes, INT8 asked without Q/DQ nodes.
        UsageError: a DLA that this version or machine does not have, or not at FP32.
        UnavailableError: out of memory, no GPU.
        BackendError: the builder failed otherwise.
    """
    began_ns = time.monotonic_ns()
    log = shared_log(trt)
    log.lines.clear()
    builder = _made(trt.Builder(log.logger), "a builder", log)
    flags = trt.NetworkDefinitionCreationFlag
    typed = hasattr(flags, "STRONGLY_TYPED")
    bits = [
        getattr(flags, flag)
        for flag in ("EXPLICIT_BATCH", "STRONGLY_TYPED")
        if hasattr(flags, flag)
    ]
    network = _made(builder.create_network(sum(1 << int(bit) for bit in bits)), "a network", log)
    parser = trt.OnnxParser(network, log.logger)
    if not parser.parse(onnx_bytes):
        raise _parse_error(trt, parser, log, name)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    inputs = tuple(_form(network.get_input(i)) for i in range(network.num_inputs))
    outputs = tuple(_form(network.get_output(i)) for i in range(network.num_outputs))
    _check_network(trt, layers, inputs, outputs, options, name)

    config = _made(builder.create_builder_config(), "a configuration", log)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    config.builder_optimization_level = options.optimization_level
    config.max_aux_streams = 0
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.clear_flag(trt.BuilderFlag.TF32)  # FP32 is the reference: all 23 bits of it
    if not typed and options.precision != "fp32":
        config.set_flag(trt.BuilderFlag.FP16)
        if options.precision == QUANTIZED:
            config.set_flag(trt.BuilderFlag.INT8)
    if options.dla_core >= 0:
        _use_dla(trt, builder, config, options)
    timing_cache = _timing_cache(config, options.timing_cache)
    monitor = _monitor(trt, progress) if progress and hasattr(trt, "IProgressMonitor") else None
    if monitor is not None:
        config.progress_monitor = monitor
    if progress is not None:
        progress("building", 0, 0)
    serialized = builder.build_serialized_network(network, config)
    if monitor is not None and monitor.interrupt is not None:
        raise monitor.interrupt
    if serialized is None:
        raise _build_error(log, name, options)
    kept = timing_cache.serialize() if timing_cache is not None else None
    return BuiltEngine(
        plan=bytes(serialized),
        inputs=inputs,
        outputs=outputs,
        layer_types=_layer_types(layers),
        strongly_typed=typed,
        timing_cache=b"" if kept is None else bytes(kept),
        warnings=tuple(_first_line(line) for severity, line in log.lines if severity == "WARNING"),
        build_ns=time.monotonic_ns() - began_ns,
    )


def _check_network(
    trt: Any,
    layers: list[Any],
    inputs: tuple[TensorForm, ...],
    outputs: tuple[TensorForm, ...],
    options: BuildOptions,
    name: str,
) -> None:
    if not (inputs and outputs):
        raise ModelError(f"{name}: the network has no input or no output: export the model again")
    for tensor in (*inputs, *outputs):
        if min(tensor.shape, default=1) < 1:
            raise ModelError(
                f"{name}: tensor '{tensor.name}' has the dynamic shape {list(tensor.shape)}: "
                "export the model with fixed shapes"
            )
    quantized = any(layer.type == trt.LayerType.QUANTIZE for layer in layers)
    if options.precision == QUANTIZED and not quantized:
        raise ModelError(
            f"{name}: INT8 is asked for, but the file has no Q/DQ (QuantizeLinear, "
            "DequantizeLinear) nodes: make them by calibration (`perception_rt model build "
            "--precision int8 --calibration FOLDER`), or use fp16"
        )


def _use_dla(trt: Any, builder: Any, config: Any, options: BuildOptions) -> None:
    refusal = dla_refusal(str(trt.__version__))
    if not refusal and options.precision == "fp32":
        refusal = "a DLA runs FP16 and INT8 only: use --precision fp16 or int8"
    if not refusal and options.dla_core >= builder.num_DLA_cores:
        count = builder.num_DLA_cores
        refusal = (
            f"--dla-core {options.dla_core}: this machine has {count} DLA cores as TensorRT sees "
            "it: " + (f"use 0 to {count - 1}" if count else "leave out --dla-core")
        )
    if refusal:
        raise UsageError(refusal)
    config.default_device_type = trt.DeviceType.DLA
    config.DLA_core = options.dla_core
    config.set_flag(trt.BuilderFlag.GPU_FALLBACK)


def _timing_cache(config: Any, data: bytes) -> Any:
    """Give the configuration the cache, or a fresh one where TensorRT does not take this one."""
    for candidate in (data, b"") if data else (b"",):
        try:
            cache = config.create_timing_cache(candidate)
            if cache is not None and config.set_timing_cache(cache, False):
                return cache
        except (RuntimeError, TypeError, ValueError):
            continue
    return None


def _layer_types(layers: list[Any]) -> dict[str, int]:
    # Constants and shapes are folded away: what counts is what computes.
    computing = [layer for layer in layers if layer.num_inputs > 0 and layer.num_outputs > 0]
    counts = Counter(_name_of(layer.get_output(0).dtype) for layer in computing)
    return dict(sorted(counts.items()))


def _form(tensor: Any) -> TensorForm:
    return TensorForm(
        str(tensor.name), tuple(int(side) for side in tensor.shape), _name_of(tensor.dtype)
    )


def _name_of(value: Any) -> str:
    """``FLOAT`` of ``DataType.FLOAT``."""
    return str(value).rpartition(".")[2]


def _parse_error(trt: Any, parser: Any, log: TrtLog, name: str) -> ModelError:
    """One line for what the parser refused: operator, node and reason of each, at most three."""
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    shown = []
    for error in errors[:_MAX_ERRORS_SHOWN]:
        number = int(error.node())
        if number < 0:
            return ModelError(
                f"{name} is not an ONNX file that {builder_name(trt)} can read "
                f"({_first_line(error.desc())}): export the model again"
            )
        operator, node = _operator(error, number, log)
        label = f"'{node}', " if node else ""
        shown.append(f"op '{operator}' (node {label}number {number}): {_first_line(error.desc())}")
    more = len(errors) - len(shown)
    reasons = "; ".join(dict.fromkeys(shown)) or "no reason given"
    return ModelError(
        f"{name}: {builder_name(trt)} does not support {reasons}"
        + (f"; and {more} more" if more > 0 else "")
        + ": export the model without it, or use backend onnxruntime"
    )


def _operator(error: Any, number: int, log: TrtLog) -> tuple[str, str]:
    """Operator and name of the node of a parser error; 8.6 says them in its log only."""
    if hasattr(error, "node_operator"):
        return str(error.node_operator()), str(error.node_name())
    text = "\n".join(line for _, line in log.lines)
    found = re.search(rf"node number {number} \[(\w+)", text)
    named = re.search(r'\bname: "([^"]*)"\s*\n?op_type', text) or re.search(
        r'Node name: *"?([^"\n]+)', text
    )
    return found.group(1) if found else "unknown", named.group(1) if named else ""


def _build_error(log: TrtLog, name: str, options: BuildOptions) -> Exception:
    errors = [line for severity, line in log.lines if "ERROR" in severity]
    text = " ".join(errors)
    reason = _first_line(errors[-1] if errors else "no reason given")
    if re.search(
        r"out ?of ?memory|insufficient memory|MEM_ALLOC|OutOfMemory", text, re.IGNORECASE
    ):
        return UnavailableError(
            f"{name}: out of memory while building at {options.precision} ({reason}): end other "
            "programs that use the GPU (on Jetson also the desktop), or build on an idle machine"
        )
    if re.search(
        r"no CUDA-capable device|CUDA initialization failure|insufficient driver",
        text,
        re.IGNORECASE,
    ):
        return UnavailableError(
            f"{name}: no usable GPU ({reason}): check nvidia-smi or tegrastats"
        )
    return BackendError(
        f"{name}: TensorRT cannot build it at {options.precision} ({reason}): try another "
        "--precision, or use backend onnxruntime"
    )


def _made(value: Any, what: str, log: TrtLog) -> Any:
    """TensorRT answers None instead of raising."""
    if value is None:
        errors = [line for _, line in log.lines]
        reason = _first_line(errors[-1]) if errors else "no reason given"
        raise UnavailableError(
            f"TensorRT cannot make {what} ({reason}): check the GPU with nvidia-smi or tegrastats"
        )
    return value


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""


@dataclass
class TrtLog:
    """TensorRT's messages, warning and worse, as (severity, text)."""

    logger: Any
    lines: list[tuple[str, str]]


_logs: dict[str, TrtLog] = {}


def shared_log(trt: Any) -> TrtLog:
    """The process's one log of a module: TensorRT ignores every logger but its first."""
    kept = _logs.get(trt.__name__)
    if kept is not None:
        return kept
    lines: list[tuple[str, str]] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING and len(lines) < 1000:
                lines.append((_name_of(severity), message))

    _logs[trt.__name__] = TrtLog(Logger(), lines)
    return _logs[trt.__name__]


def _monitor(trt: Any, progress: Progress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Tells of TensorRT's phases; nothing may be raised into its C++ frames."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.interrupt: BaseException | None = None
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None:
            del parent_phase
            self.steps[phase_name] = num_steps
            self._tell(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._tell(phase_name, step + 1)
            return self.interrupt is None

        def phase_finish(self, phase_name: str) -> None:
            self._tell(phase_name, self.steps.pop(phase_name, 0))

        def _tell(self, phase_name: str, step: int) -> None:
            try:
                progress(phase_name, step, self.steps.get(phase_name, 0))
            except BaseException as error:  # noqa: BLE001 (raised by build_segment)
                self.interrupt = error

    return Monitor()


def describe(built: BuiltEngine) -> dict[str, Any]:
    """What the cache keeps beside an engine, JSON-ready."""
    return {
        "layer_types": built.layer_types,
        "strongly_typed": built.strongly_typed,
        "build_ns": built.build_ns,
        "size_mb": round(len(built.plan) / _ENGINE_MB, 3),
        "warnings": list(built.warnings),
        "inputs": [[t.name, list(t.shape), t.dtype] for t in built.inputs],
        "outputs": [[t.name, list(t.shape), t.dtype] for t in built.outputs],
    }
