"""The NanoDet-g graph: where it is cut, the early heads, the decode, and how images enter.

Every exit writes `detections`, float32 [1, 3549, 84]: left, top, right, bottom in input pixels
(not clipped to the image), then 80 scores after sigmoid. Rows run over strides 8, 16, 32, each
grid row by row; the anchor of cell (x, y) is ((x + 0.5) * stride, (y + 0.5) * stride). A side is
the expectation over 11 bins times the stride (Generalized Focal Loss, arXiv:2006.04388).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import cv2
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

SIZE = 416
MEAN = (103.53, 116.28, 123.675)
STD = (57.375, 57.12, 58.395)
PAD_VALUE = 114
STRIDES = (8, 16, 32)
GRIDS = tuple(SIZE // s for s in STRIDES)
ANCHORS = sum(g * g for g in GRIDS)
BINS = 11
CLASSES = 80
# person, bicycle, car, motorcycle, bus, truck, traffic light, stop sign
TRAINED = (0, 1, 2, 3, 5, 7, 9, 11)
VEHICLES = (2, 5, 7)
OPSET = 13

# tensors of the source graph (after folding)
PREFIX = "PartitionedCall/onnx_tf_prefix_"
RENAME = {
    "input_1:0": "image",
    PREFIX + "Concat_27:0": "features_s8",
    PREFIX + "Concat_42:0": "features_s16",
    PREFIX + "LeakyRelu_44:0": "features_s32a",
    PREFIX + "LeakyRelu_46:0": "features_s32b",
}
SOURCE_MAPS = ("Conv__176:0", "Conv__178:0", "Conv__180:0")
FEATURES = {
    "features_s8": (1, 128, 52, 52),
    "features_s16": (1, 256, 26, 26),
    "features_s32a": (1, 256, 13, 13),
    "features_s32b": (1, 128, 13, 13),
}
SEGMENT_INPUTS = (("image",), ("features_s8",), tuple(FEATURES))
SEGMENT_FEATURES = (("features_s8",), ("features_s16", "features_s32a", "features_s32b"), ())

T = TypeVar("T")


class HeadOps(Protocol[T]):
    """What the head topology needs; implemented with ONNX nodes here, with PyTorch in training."""

    def conv(
        self, x: T, name: str, cin: int, cout: int, k: int, stride: int, groups: int, act: bool
    ) -> T: ...

    def up(self, x: T) -> T: ...

    def add(self, a: T, b: T) -> T: ...


def early_head(ops: HeadOps[T], exit_index: int, f: dict[str, T]) -> tuple[T, T, T]:
    """The neck and head of exit 0 (from features_s8 only) and exit 1 (from all of FEATURES).

    Returns one map [1, len(TRAINED) + 4 * BINS, g, g] per stride 8, 16, 32.
    """

    def dw(x: T, name: str, cin: int, cout: int, k: int = 3, stride: int = 1) -> T:
        x = ops.conv(x, name + ".dw", cin, cin, k, stride, cin, False)
        return ops.conv(x, name + ".pw", cin, cout, 1, 1, 1, True)

    def res(x: T, name: str, c: int) -> T:
        return ops.add(x, dw(x, name, c, c, k=5))

    p8 = ops.conv(f["features_s8"], "lat8", 128, 64, 1, 1, 1, True)
    if exit_index == 0:
        p16 = dw(f["features_s8"], "down16", 128, 96, stride=2)
        p16 = res(res(p16, "s16a", 96), "s16b", 96)
        p32 = dw(p16, "down32", 96, 128, stride=2)
    else:
        p16 = ops.conv(f["features_s16"], "lat16", 256, 96, 1, 1, 1, True)
        p32 = ops.add(
            ops.conv(f["features_s32a"], "lat32a", 256, 128, 1, 1, 1, True),
            ops.conv(f["features_s32b"], "lat32b", 128, 128, 1, 1, 1, True),
        )
    p32 = res(res(p32, "s32a", 128), "s32b", 128)
    p16 = res(ops.add(p16, ops.up(ops.conv(p32, "top16", 128, 96, 1, 1, 1, True))), "s16c", 96)
    p8 = res(ops.add(p8, ops.up(ops.conv(p16, "top8", 96, 64, 1, 1, 1, True))), "s8a", 64)
    maps = []
    for stride, x, c in zip(STRIDES, (p8, p16, p32), (64, 96, 128)):
        x = dw(x, f"head{stride}", c, c)
        maps.append(ops.conv(x, f"out{stride}", c, len(TRAINED) + 4 * BINS, 1, 1, 1, False))
    return maps[0], maps[1], maps[2]


class Graph:
    """Collects ONNX nodes and initialisers; weights come from a dict of folded convolutions."""

    def __init__(self, prefix: str, weights: dict[str, F32] | None = None) -> None:
        self.prefix = prefix
        self.weights = weights or {}
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}

    def const(self, name: str, value: npt.NDArray[Any]) -> str:
        self.initializers[self.prefix + name] = numpy_helper.from_array(value, self.prefix + name)
        return self.prefix + name

    def op(
        self, kind: str, inputs: list[str], out: str, n_out: int = 1, **attrs: Any
    ) -> list[str]:
        names = [f"{self.prefix}{out}" + (f".{i}" if n_out > 1 else "") for i in range(n_out)]
        node = helper.make_node(kind, inputs, names, name=self.prefix + out, **attrs)
        self.nodes.append(node)
        return names

    def conv(
        self, x: str, name: str, cin: int, cout: int, k: int, stride: int, groups: int, act: bool
    ) -> str:
        weight, bias = self.weights[name + ".weight"], self.weights[name + ".bias"]
        if weight.shape != (cout, cin // groups, k, k) or bias.shape != (cout,):
            raise SystemExit(f"heads file: layer {name} has the wrong shape {weight.shape}")
        inputs = [x, self.const(name + ".w", weight), self.const(name + ".b", bias)]
        (y,) = self.op(
            "Conv",
            inputs,
            name,
            kernel_shape=[k, k],
            strides=[stride, stride],
            pads=[k // 2] * 4,
            group=groups,
        )
        return self.op("Relu", [y], name + ".relu")[0] if act else y

    def up(self, x: str) -> str:
        scales = self.const("scales2", np.array([1, 1, 2, 2], np.float32))
        return self.op(
            "Resize",
            [x, "", scales],
            f"up{len(self.nodes)}",
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )[0]

    def add(self, a: str, b: str) -> str:
        return self.op("Add", [a, b], f"add{len(self.nodes)}")[0]


def anchor_points() -> tuple[F32, F32]:
    """Anchor centres [1, 2, A] in input pixels and strides [1, 1, A]."""
    centres, strides = [], []
    for g, s in zip(GRIDS, STRIDES):
        yy, xx = np.divmod(np.arange(g * g), g)
        centres.append(np.stack([(xx + 0.5) * s, (yy + 0.5) * s]))
        strides.append(np.full(g * g, s))
    return (
        np.concatenate(centres, 1)[None].astype(np.float32),
        np.concatenate(strides)[None, None].astype(np.float32),
    )


def add_decode(g: Graph, maps: list[str], classes: tuple[int, ...]) -> None:
    """Append the decode of raw maps [1, C + 44, g, g] to `detections` [1, A, 84]."""
    c = len(classes)
    flat = []
    for grid, stride, x in zip(GRIDS, STRIDES, maps):
        shape = g.const(f"flat{stride}", np.array([1, c + 4 * BINS, grid * grid], np.int64))
        flat += g.op("Reshape", [x, shape], f"decode.flat{stride}")
    (raw,) = g.op("Concat", flat, "decode.raw", axis=2)
    split = g.const("split", np.array([c, 4 * BINS], np.int64))
    logits, sides = g.op("Split", [raw, split], "decode.split", n_out=2, axis=1)
    (scores,) = g.op("Sigmoid", [logits], "decode.sigmoid")
    if c != CLASSES:  # untrained classes read a row of zeros
        rows = np.full(CLASSES, c, np.int64)
        rows[list(classes)] = np.arange(c)
        zero = g.const("zero_row", np.zeros((1, 1, ANCHORS), np.float32))
        (padded,) = g.op("Concat", [scores, zero], "decode.padded", axis=1)
        (scores,) = g.op("Gather", [padded, g.const("rows", rows)], "decode.classes", axis=1)
    shape = g.const("bins", np.array([1, 4, BINS, ANCHORS], np.int64))
    (bins,) = g.op("Reshape", [sides, shape], "decode.bins")
    (prob,) = g.op("Softmax", [bins], "decode.softmax", axis=2)
    steps = g.const("steps", np.arange(BINS, dtype=np.float32).reshape(1, 1, BINS, 1))
    (weighted,) = g.op("Mul", [prob, steps], "decode.weighted")
    axes = g.const("axes", np.array([2], np.int64))
    (dist,) = g.op("ReduceSum", [weighted, axes], "decode.distance", keepdims=0)
    centres, strides = anchor_points()
    sign = np.array([-1, -1, 1, 1], np.float32).reshape(1, 4, 1)
    (offset,) = g.op("Mul", [dist, g.const("signed_strides", sign * strides)], "decode.offset")
    centre4 = g.const("centres", np.concatenate([centres, centres], 1))
    (boxes,) = g.op("Add", [offset, centre4], "decode.boxes")
    (both,) = g.op("Concat", [boxes, scores], "decode.both", axis=1)
    g.op("Transpose", [both], "detections", perm=[0, 2, 1])
    g.nodes[-1].output[0] = "detections"


def load_source(path: Path) -> onnx.ModelProto:
    """The source network with constants and padding folded and the cut tensors renamed."""
    with tempfile.TemporaryDirectory() as tmp:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(Path(tmp) / "folded.onnx")
        options.log_severity_level = 3
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        model = onnx.load(options.optimized_model_filepath)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", OPSET))
    model.ir_version = 8
    graph = model.graph
    # the one Pad left feeds the MaxPool, whose own padding is minus infinity as well
    for pad in [n for n in graph.node if n.op_type == "Pad"]:
        (pool,) = [n for n in graph.node if pad.output[0] in n.input]
        assert pool.op_type == "MaxPool"
        pool.input[0] = pad.input[0]
        pool.attribute.append(helper.make_attribute("pads", [1, 1, 1, 1]))
        graph.node.remove(pad)
    for node in graph.node:
        if node.op_type == "Resize":
            node.input[1] = ""
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = RENAME.get(name, name)
    for value in graph.input:
        value.name = RENAME.get(value.name, value.name)
    return model


def cut(
    source: onnx.ModelProto,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    name: str,
    extra: Graph | None = None,
    exposed: tuple[str, ...] = (),
) -> onnx.ModelProto:
    """The part of `source` that computes `outputs` from `inputs`, plus the nodes of `extra`.

    The model's own outputs are `exposed`, or `outputs` where that is empty.
    """
    shapes = {"image": (1, 3, SIZE, SIZE), "detections": (1, ANCHORS, 4 + CLASSES), **FEATURES}
    shapes.update({m: (1, CLASSES + 4 * BINS, g, g) for m, g in zip(SOURCE_MAPS, GRIDS)})
    producer = {o: n for n in source.graph.node for o in n.output}
    wanted, todo = set(), [t for t in outputs if t not in inputs]
    while todo:
        node = producer.get(todo.pop())
        if node is None or node.output[0] in wanted:
            continue
        wanted.add(node.output[0])
        todo += [i for i in node.input if i and i not in inputs]
    nodes = [n for n in source.graph.node if n.output[0] in wanted]
    tensors = {t.name: t for t in source.graph.initializer}
    if extra is not None:
        nodes += extra.nodes
        tensors.update(extra.initializers)
    used = {i for n in nodes for i in n.input}
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(t, TensorProto.FLOAT, shapes[t]) for t in inputs],
        [
            helper.make_tensor_value_info(t, TensorProto.FLOAT, shapes[t])
            for t in exposed or outputs
        ],
        [t for k, t in tensors.items() if k in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version, model.producer_name = 8, "perception_rt export_segments"
    onnx.checker.check_model(model, full_check=True)
    return model


def build_segments(source: onnx.ModelProto, heads: dict[str, F32]) -> list[onnx.ModelProto]:
    """Three segments: trunk part k, its exit head with decode, and the features that go on."""
    segments = []
    for k in range(3):
        if k < 2:
            prefix = f"exit{k}."
            weights = {n[len(prefix) :]: w for n, w in heads.items() if n.startswith(prefix)}
            extra = Graph(prefix, weights)
            add_decode(extra, list(early_head(extra, k, {n: n for n in FEATURES})), TRAINED)
            outputs: tuple[str, ...] = SEGMENT_FEATURES[k]
        else:
            extra = Graph("exit2.")
            add_decode(extra, list(SOURCE_MAPS), tuple(range(CLASSES)))
            outputs = SOURCE_MAPS
        exposed = ("detections", *SEGMENT_FEATURES[k])
        segments.append(cut(source, SEGMENT_INPUTS[k], outputs, f"segment_{k}", extra, exposed))
    return segments


def session(model: onnx.ModelProto | Path) -> ort.InferenceSession:
    """One-thread CPU session, without spinning."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    what = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(what, options, providers=["CPUExecutionProvider"])


def letterbox(image: U8) -> tuple[U8, float, int, int]:
    """BGR image to a centred SIZE x SIZE canvas: canvas, scale, left and top offset in pixels."""
    h, w = image.shape[:2]
    scale = min(SIZE / w, SIZE / h)
    nw, nh = max(1, round(w * scale)), max(1, round(h * scale))
    left, top = (SIZE - nw) // 2, (SIZE - nh) // 2
    canvas = np.full((SIZE, SIZE, 3), PAD_VALUE, np.uint8)
    canvas[top : top + nh, left : left + nw] = cv2.resize(image, (nw, nh))
    return canvas, scale, left, top


def normalise(canvas: U8) -> F32:
    """BGR canvas to the network's input, float32 [1, 3, SIZE, SIZE]."""
    x = (canvas.astype(np.float32) - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return np.ascontiguousarray(x.transpose(2, 0, 1)[None])


def video_frames(path: Path, first: int, last: int, step: int) -> Iterator[U8]:
    """Frames first..last of a video, counted from 1, every `step`-th."""
    capture = cv2.VideoCapture(str(path))
    if not capture.isOpened():
        raise SystemExit(f"cannot open the video {path}")
    for number in range(1, last + 1):
        ok, frame = capture.read()
        if not ok:
            break
        if number >= first and (number - first) % step == 0:
            yield np.asarray(frame, np.uint8)


def run_chain(sessions: list[ort.InferenceSession], image: F32) -> list[F32]:
    """`detections` of every exit; features are handed on by name."""
    values: dict[str, F32] = {"image": image}
    out = []
    for s in sessions:
        names = [o.name for o in s.get_outputs()]
        values.update(zip(names, s.run(names, {i.name: values[i.name] for i in s.get_inputs()})))
        out.append(values["detections"][0])
    return out
