"""Variants of a segment's ONNX file: FP16 and INT8, with float32 inputs and outputs.

Tensors that cross a cut stay float32, so that segments of any precision fit together. What comes
behind the last convolution (the decode to pixels and scores) stays float32 too: at 416 pixels FP16
has steps of a quarter pixel. ``onnx`` and, for INT8, ONNX Runtime's quantisation tools are needed
only where such a file is made.

INT8 is what TensorRT takes: S8S8, symmetric, weights per channel, bias in float, explicit Q/DQ
around convolutions only; scales by min-max over the calibration frames.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.errors import InputError, ModelError, UnavailableError, UsageError
from perception_rt.detector.model import Model
from perception_rt.detector.preprocess import Preprocessor

Feed = dict[str, NDArray[np.float32]]

MIN_CALIBRATION_FRAMES = 8
_HALF = "@fp16"
_HALF_MAX = 65504.0
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_QUANTIZE = "QuantizeLinear"


def make_variant(
    onnx_bytes: bytes, precision: str, feeds: Sequence[Feed] = (), name: str = "the ONNX file"
) -> bytes:
    """The segment at a precision; deterministic for equal input and library versions.

    Args:
        onnx_bytes: the float32 segment; for ``int8`` it may hold Q/DQ nodes already.
        precision: ``fp32`` (as it is), ``fp16`` or ``int8``.
        feeds: for ``int8`` without Q/DQ: inputs by name, one entry per calibration frame.
        name: of the file, for messages.

    Raises:
        ModelError: not an ONNX file, or the tools cannot convert it.
        UsageError: unknown precision, or INT8 with too few calibration frames.
        UnavailableError: the tools are not installed.
    """
    if precision == "fp32":
        return onnx_bytes
    if precision not in ("fp16", "int8"):
        raise UsageError(f"precision '{precision}' is unknown: use fp32, fp16 or int8")
    graph_model = _load(onnx_bytes, name)
    quantized = has_qdq(graph_model)
    if precision == "int8" and not quantized:
        if len(feeds) < MIN_CALIBRATION_FRAMES:
            raise UsageError(
                f"{name}: INT8 without Q/DQ nodes in the file needs at least "
                f"{MIN_CALIBRATION_FRAMES} calibration frames, got {len(feeds)}: give "
                "--calibration FOLDER (pictures) or a recording"
            )
        return _int8(graph_model, feeds, name)
    if precision == "int8":
        return onnx_bytes
    if quantized:
        raise ModelError(f"{name}: the file has Q/DQ nodes: it is made for --precision int8")
    return _fp16(graph_model, name)


def has_qdq(model: Any) -> bool:
    """True where an ONNX model (onnx.ModelProto) quantises anything."""
    return any(node.op_type == _QUANTIZE for node in model.graph.node)


def calibration_feeds(model: Model, images: Iterable[NDArray[np.uint8]]) -> list[list[Feed]]:
    """Inputs of every segment for every image, from the float32 segments under ONNX Runtime.

    Args:
        model: the model.
        images: uint8 [height, width, 3], BGR.

    Returns:
        By segment, by image: inputs by name.

    Raises:
        InputError: no image came.
        UnavailableError: ONNX Runtime is not installed.
    """
    ort = _tool("onnxruntime", "onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    sessions = [
        ort.InferenceSession(segment.read(), options, providers=["CPUExecutionProvider"])
        for segment in model.segments
    ]
    preprocessor = Preprocessor(model)
    feeds: list[list[Feed]] = [[] for _ in sessions]
    for image in images:
        tensor = np.zeros(model.input.tensor.shape, np.float32)
        preprocessor.run(image, tensor)
        values: Feed = {model.input.tensor.name: tensor}
        for segment, session in zip(model.segments, sessions):
            feed = {spec.name: values[spec.name] for spec in segment.inputs}
            feeds[segment.index].append(feed)
            names = [spec.name for spec in segment.features]
            if names:
                values.update(zip(names, session.run(names, feed)))
    if not feeds[0]:
        raise InputError("no calibration frame could be read: give a folder of pictures or a bag")
    return feeds


def _fp16(model: Any, name: str) -> bytes:
    """Convolutions and everything that feeds one in FP16, with casts where FP16 meets float32.

    A float tensor ``t`` has a float32 form of that name and an FP16 form ``t@fp16``; whoever makes
    one of them, a cast makes the other where it is read.
    """
    onnx = _tool("onnx", "onnx")
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    graph = model.graph
    decode = set(_decode_nodes(model))
    floats = _float_tensors(onnx, model, name)
    inside = [
        node
        for node in graph.node
        if node.name not in decode and any(tensor in floats for tensor in node.output)
    ]
    read, made = _rename_to_half(inside, floats)
    kept = {tensor for node in graph.node for tensor in node.input}
    kept |= {output.name for output in graph.output}

    def cast(tensor: str, to: int) -> Any:
        source, target = (tensor, tensor + _HALF) if to == half else (tensor + _HALF, tensor)
        return onnx.helper.make_node("Cast", [source], [target], name=f"cast:{target}", to=to)

    initializers = []
    for initializer in graph.initializer:
        if initializer.name in kept:
            initializers.append(initializer)
        if initializer.name in read:
            initializers.append(_half_weight(onnx, initializer, name))
    stored = {initializer.name for initializer in graph.initializer}
    nodes = [cast(spec.name, half) for spec in graph.input if spec.name in read - stored]
    for node in graph.node:
        nodes.append(node)
        nodes += [cast(tensor, half) for tensor in node.output if tensor in read]
        plain = [tensor.removesuffix(_HALF) for tensor in node.output if tensor.endswith(_HALF)]
        nodes += [cast(tensor, single) for tensor in plain if tensor in made & kept]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.extend(initializers)
    data: bytes = model.SerializeToString()
    return data


def _rename_to_half(nodes: Sequence[Any], floats: set[str]) -> tuple[set[str], set[str]]:
    """Let nodes read and write FP16 forms; returns the tensors that they read and make in FP16."""
    read: set[str] = set()
    made: set[str] = set()
    for node in nodes:
        for i, tensor in enumerate(node.input):
            # The regions and scales of a Resize are float32 by its definition.
            if tensor in floats and not (node.op_type == "Resize" and i > 0):
                read.add(tensor)
                node.input[i] = tensor + _HALF
        for i, tensor in enumerate(node.output):
            if tensor in floats:
                made.add(tensor)
                node.output[i] = tensor + _HALF
    return read, made


def _half_weight(onnx: Any, initializer: Any, name: str) -> Any:
    values = onnx.numpy_helper.to_array(initializer)
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= _HALF_MAX:  # NaN too
        raise ModelError(
            f"{name}: weight '{initializer.name}' holds {largest:g}, which does not fit into FP16 "
            f"(at most {_HALF_MAX:g}): use --precision fp32"
        )
    return onnx.numpy_helper.from_array(values.astype(np.float16), initializer.name + _HALF)


def _float_tensors(onnx: Any, model: Any, name: str) -> set[str]:
    """Names of the float32 tensors of a graph."""
    try:
        graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    except Exception as error:
        raise ModelError(f"{name} cannot be converted to FP16 ({_brief(error)})") from error
    single = onnx.TensorProto.FLOAT
    infos = (*graph.input, *graph.output, *graph.value_info)
    names = {info.name for info in infos if info.type.tensor_type.elem_type == single}
    return names | {tensor.name for tensor in graph.initializer if tensor.data_type == single}


def _int8(model: Any, feeds: Sequence[Feed], name: str) -> bytes:
    tools = _tool("onnxruntime.quantization", "onnxruntime")
    decode = _decode_nodes(model)

    class Reader(tools.CalibrationDataReader):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self.feeds: Iterator[Feed] = iter(feeds)

        def get_next(self) -> Feed | None:
            return next(self.feeds, None)

    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # the tool logs advice to the root logger
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "int8.onnx"
            tools.quantize_static(
                model,
                str(out),
                Reader(),
                quant_format=tools.QuantFormat.QDQ,
                per_channel=True,
                activation_type=tools.QuantType.QInt8,
                weight_type=tools.QuantType.QInt8,
                op_types_to_quantize=list(_CONVOLUTIONS),
                nodes_to_exclude=decode,
                calibrate_method=tools.CalibrationMethod.MinMax,
                extra_options={
                    "ActivationSymmetric": True,
                    "WeightSymmetric": True,
                    "QuantizeBias": False,
                    # A convolution and its activation stay in one piece.
                    "OpTypesToExcludeOutputQuantization": list(_CONVOLUTIONS),
                },
            )
            return out.read_bytes()
    except Exception as error:
        raise ModelError(f"{name} cannot be quantised to INT8 ({_brief(error)})") from error
    finally:
        root.setLevel(level)


def _decode_nodes(model: Any) -> list[str]:
    """Names of the nodes behind which no convolution comes, convolutions themselves excepted.

    Nodes without a name get one: the tools take names only.
    """
    readers: dict[str, list[int]] = {}
    nodes = model.graph.node
    for i, node in enumerate(nodes):
        node.name = node.name or f"unnamed_{i}"
        for tensor in node.input:
            readers.setdefault(tensor, []).append(i)
    feeds_convolution = [False] * len(nodes)
    for i in range(len(nodes) - 1, -1, -1):  # ONNX nodes are in topological order
        feeds_convolution[i] = any(
            nodes[j].op_type in _CONVOLUTIONS or feeds_convolution[j]
            for tensor in nodes[i].output
            for j in readers.get(tensor, ())
        )
    return [
        node.name
        for node, inside in zip(nodes, feeds_convolution)
        if not inside and node.op_type not in _CONVOLUTIONS
    ]


def _load(data: bytes, name: str) -> Any:
    onnx = _tool("onnx", "onnx")
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:
        raise ModelError(
            f"{name} is not an ONNX file ({_brief(error)}): export the model again"
        ) from error
    if not model.graph.node:
        raise ModelError(f"{name} is not an ONNX file with a network: export the model again")
    return model


def _tool(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # one built for another NumPy fails in any way there is
        raise UnavailableError(
            f"{package} cannot be imported ({_brief(error)}), which other precisions than fp32 "
            f"need: pip install onnx onnxruntime, or use --precision fp32"
        ) from error


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
