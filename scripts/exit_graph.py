"""The early-exit network, written once: NanoDet-g's trunk, where it is cut, and the exit heads.

`segment` states the topology over a small set of operations (`Ops`); training implements them with
PyTorch, `Graph` here with ONNX nodes. Every exit writes `detections`, float32 [1, A, 4 + 8]: left,
top, right, bottom in input pixels (not clipped to the image), then the scores of LABELS after
sigmoid. Rows run over strides 8, 16, 32, each grid row by row; the anchor of cell (x, y) is
((x + 0.5) * stride, (y + 0.5) * stride). A side is the expectation over 11 bins times the stride
(Generalized Focal Loss, arXiv:2006.04388).
"""

from __future__ import annotations

from collections.abc import Sequence
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
Weights = dict[str, F32]

HEIGHT, WIDTH = 320, 544
MEAN = (103.53, 116.28, 123.675)
STD = (57.375, 57.12, 58.395)
PAD_VALUE = 114
STRIDES = (8, 16, 32)
BINS = 11
LABELS = (
    "person",
    "bicycle",
    "car",
    "motorcycle",
    "bus",
    "truck",
    "traffic light",
    "stop sign",
)
CLASSES = len(LABELS)
COCO_ROWS = (0, 1, 2, 3, 5, 7, 9, 11)  # of LABELS among COCO's 80
COCO_CLASSES = 80
OUTPUTS = CLASSES + 4 * BINS
OPSET = 13

EXITS = 4
# What each segment hands on: name, channels, stride.
FEATURES = {
    "features_s8a": (64, 8),
    "features_s8": (128, 8),
    "features_s16a": (128, 16),
    "features_s16b": (128, 16),
    "features_s16": (256, 16),
    "features_s32a": (256, 32),
    "features_s32b": (256, 32),
}
SEGMENT_INPUTS = (
    ("image",),
    ("features_s8a",),
    ("features_s8", "features_s16a", "features_s16b"),
    ("features_s8", "features_s16", "features_s32a", "features_s32b"),
)
SEGMENT_FEATURES = (
    ("features_s8a",),
    ("features_s8", "features_s16a", "features_s16b"),
    ("features_s16", "features_s32a", "features_s32b"),
    (),
)

T = TypeVar("T")


class Ops(Protocol[T]):
    """What the topology needs. Convolutions pad by k // 2."""

    def conv(
        self, x: T, name: str, cin: int, cout: int, k: int, stride: int, groups: int, act: str
    ) -> T: ...

    def max_pool(self, x: T) -> T: ...

    def concat(self, a: T, b: T) -> T: ...

    def add(self, a: T, b: T) -> T: ...

    def nearest_up(self, x: T) -> T: ...

    def linear(self, x: T, scale: float) -> T: ...


def _source(ops: Ops[T], x: T, i: int, cin: int, cout: int, stride: int = 1) -> T:
    """Convolution i of the source network, 3x3 with its leaky ReLU."""
    return ops.conv(x, f"conv{i}", cin, cout, 3, stride, 1, "leaky")


def _pairs(ops: Ops[T], x: T, first: int, c: int, depth: int) -> T:
    """`depth` pairs of a source block of c channels; convolutions are numbered from `first`."""
    y = x
    for d in range(depth):
        a = _source(ops, y, first + 2 * d, c, c // 2)
        b = _source(ops, a, first + 2 * d + 1, c // 2, c // 2)
        y = ops.concat(b, a)
    return y


def _close(ops: Ops[T], x: T, y: T, i: int, c: int) -> T:
    """The end of a source block: convolution i over the pairs' y, beside the block's input x."""
    return ops.concat(_source(ops, y, i, c, c), x)


def _trunk(ops: Ops[T], k: int, f: dict[str, T]) -> dict[str, T]:
    """The features that segment k adds."""
    if k == 0:
        x = ops.max_pool(_source(ops, f["image"], 0, 3, 32, 2))
        x = _source(ops, x, 1, 32, 32)
        x = _close(ops, x, _pairs(ops, x, 2, 32, 1), 4, 32)
        return {"features_s8a": _source(ops, x, 5, 64, 64, 2)}
    if k == 1:
        x = f["features_s8a"]
        s8 = _close(ops, x, _pairs(ops, x, 6, 64, 2), 10, 64)
        x = _source(ops, s8, 11, 128, 128, 2)
        y = _pairs(ops, x, 12, 128, 2)
        return {"features_s8": s8, "features_s16a": x, "features_s16b": y}
    if k == 2:
        s16 = _close(ops, f["features_s16a"], f["features_s16b"], 16, 128)
        x = _source(ops, s16, 17, 256, 256, 2)
        y = _pairs(ops, x, 18, 256, 3)
        return {"features_s16": s16, "features_s32a": x, "features_s32b": y}
    return {}


def _early_head(ops: Ops[T], k: int, f: dict[str, T]) -> tuple[T, T, T]:
    """Neck and head of exit k < 3; they reach stride 32 whatever the trunk has so far."""

    def conv(x: T, name: str, cin: int, cout: int, n: int = 1, stride: int = 1) -> T:
        return ops.conv(x, f"exit{k}.{name}", cin, cout, n, stride, 1, "relu")

    def dw(x: T, name: str, cin: int, cout: int, n: int = 3, stride: int = 1) -> T:
        x = ops.conv(x, f"exit{k}.{name}.dw", cin, cin, n, stride, cin, "none")
        return conv(x, name + ".pw", cin, cout)

    def res(x: T, name: str, c: int) -> T:
        return ops.add(x, dw(x, name, c, c, n=5))

    c8, c16, c32 = ((40, 80, 96), (48, 80, 96), (48, 80, 96))[k]
    if k == 0:
        p8 = conv(f["features_s8a"], "lat8", 64, c8)
        p16 = conv(f["features_s8a"], "down16", 64, c16, 3, 2)
        p16 = conv(p16, "s16a", c16, c16, 3)
    else:
        p8 = conv(f["features_s8"], "lat8", 128, c8)
        s16 = ops.concat(f["features_s16a"], f["features_s16b"]) if k == 1 else f["features_s16"]
        p16 = conv(s16, "lat16", 256, c16)
    if k == 2:
        both = ops.concat(f["features_s32a"], f["features_s32b"])
        p32 = conv(both, "lat32", 512, c32)
    else:
        p32 = res(dw(p16, "down32", c16, c32, stride=2), "s32a", c32)
    p32 = res(p32, "s32b", c32)
    p16 = ops.add(p16, ops.nearest_up(conv(p32, "top16", c32, c16)))
    p16 = res(p16, "s16b", c16)
    p8 = ops.add(p8, ops.nearest_up(conv(p16, "top8", c16, c8)))
    p8 = res(p8, "s8a", c8)
    maps = []
    for stride, x, c in zip(STRIDES, (p8, p16, p32), (c8, c16, c32)):
        x = dw(x, f"head{stride}", c, c)
        maps.append(ops.conv(x, f"exit{k}.out{stride}", c, OUTPUTS, 1, 1, 1, "none"))
    return maps[0], maps[1], maps[2]


def _deepest_head(ops: Ops[T], f: dict[str, T]) -> tuple[T, T, T]:
    """The source's own neck and heads, cut to our classes."""
    p8 = ops.conv(f["features_s8"], "conv25", 128, 128, 1, 1, 1, "none")
    p16 = ops.conv(f["features_s16"], "conv26", 256, 128, 1, 1, 1, "none")
    s32 = _close(ops, f["features_s32a"], f["features_s32b"], 24, 256)
    p32 = ops.conv(s32, "conv27", 512, 128, 1, 1, 1, "none")
    p16 = ops.add(p16, ops.linear(p32, 2.0))
    p8 = ops.add(p8, ops.linear(p16, 2.0))
    p16 = ops.add(p16, ops.linear(p8, 0.5))
    p32 = ops.add(p32, ops.linear(p16, 0.5))
    maps = []
    for i, x in zip((28, 30, 32), (p8, p16, p32)):
        x = _source(ops, x, i, 128, 128)
        maps.append(ops.conv(x, f"conv{i + 1}", 128, OUTPUTS, 1, 1, 1, "none"))
    return maps[0], maps[1], maps[2]


def segment(
    ops: Ops[T], k: int, f: dict[str, T], head: bool = True
) -> tuple[dict[str, T], tuple[T, T, T] | None]:
    """Segment k on what the ones before handed on: new features, and the maps of its exit.

    A map is [1, OUTPUTS, h, w] for strides 8, 16, 32; without `head` an early exit has none.
    """
    new = _trunk(ops, k, f)
    if k == EXITS - 1:
        return new, _deepest_head(ops, f)
    return new, _early_head(ops, k, {**f, **new}) if head else None


def grids(height: int = HEIGHT, width: int = WIDTH) -> list[tuple[int, int]]:
    """Rows and columns of each stride's grid."""
    return [(height // s, width // s) for s in STRIDES]


def anchor_count(height: int = HEIGHT, width: int = WIDTH) -> int:
    return sum(h * w for h, w in grids(height, width))


def anchor_points(height: int = HEIGHT, width: int = WIDTH) -> tuple[F32, F32]:
    """Anchor centres [1, 2, A] in input pixels and strides [1, 1, A]."""
    centres, strides = [], []
    for (h, w), s in zip(grids(height, width), STRIDES):
        yy, xx = np.divmod(np.arange(h * w), w)
        centres.append(np.stack([(xx + 0.5) * s, (yy + 0.5) * s]))
        strides.append(np.full(h * w, s))
    return (
        np.concatenate(centres, 1)[None].astype(np.float32),
        np.concatenate(strides)[None, None].astype(np.float32),
    )


class Graph:
    """Collects ONNX nodes and initialisers; weights come from a dict of folded convolutions."""

    def __init__(self, weights: Weights, height: int = HEIGHT, width: int = WIDTH) -> None:
        self.weights = weights
        self.height, self.width = height, width
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}

    def const(self, name: str, value: npt.NDArray[Any]) -> str:
        self.initializers[name] = numpy_helper.from_array(value, name)
        return name

    def op(
        self, kind: str, inputs: list[str], out: str, n_out: int = 1, **attrs: Any
    ) -> list[str]:
        names = [out + (f".{i}" if n_out > 1 else "") for i in range(n_out)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=out, **attrs))
        return names

    def conv(
        self, x: str, name: str, cin: int, cout: int, k: int, stride: int, groups: int, act: str
    ) -> str:
        weight, bias = self.weights[name + ".weight"], self.weights[name + ".bias"]
        if weight.shape != (cout, cin // groups, k, k) or bias.shape != (cout,):
            raise SystemExit(f"weights file: layer {name} has the wrong shape {weight.shape}")
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
        if act == "leaky":
            return self.op("LeakyRelu", [y], name + ".act", alpha=0.1)[0]
        return self.op("Relu", [y], name + ".act")[0] if act == "relu" else y

    def max_pool(self, x: str) -> str:
        sizes: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
        return self.op("MaxPool", [x], f"pool{len(self.nodes)}", **sizes)[0]

    def concat(self, a: str, b: str) -> str:
        return self.op("Concat", [a, b], f"concat{len(self.nodes)}", axis=1)[0]

    def add(self, a: str, b: str) -> str:
        return self.op("Add", [a, b], f"add{len(self.nodes)}")[0]

    def nearest_up(self, x: str) -> str:
        return self._resize(x, 2.0, "nearest", "asymmetric")

    def linear(self, x: str, scale: float) -> str:
        return self._resize(x, scale, "linear", "half_pixel")

    def _resize(self, x: str, scale: float, mode: str, transform: str) -> str:
        scales = self.const(f"scales{scale}", np.array([1, 1, scale, scale], np.float32))
        return self.op(
            "Resize",
            [x, "", scales],
            f"resize{len(self.nodes)}",
            mode=mode,
            coordinate_transformation_mode=transform,
            nearest_mode="floor",
        )[0]

    def decode(self, maps: Sequence[str]) -> None:
        """Append the decode of the raw maps to `detections` [1, A, 4 + CLASSES]."""
        flat = []
        for (h, w), stride, x in zip(grids(self.height, self.width), STRIDES, maps):
            shape = self.const(f"flat{stride}", np.array([1, OUTPUTS, h * w], np.int64))
            flat += self.op("Reshape", [x, shape], f"decode.flat{stride}")
        (raw,) = self.op("Concat", flat, "decode.raw", axis=2)
        split = self.const("split", np.array([CLASSES, 4 * BINS], np.int64))
        logits, sides = self.op("Split", [raw, split], "decode.split", n_out=2, axis=1)
        (scores,) = self.op("Sigmoid", [logits], "decode.sigmoid")
        anchors = anchor_count(self.height, self.width)
        # softmax over 11 bins and its expectation, as two sums: a third of Softmax's time
        shape = self.const("bins", np.array([4, BINS, anchors], np.int64))
        (bins,) = self.op("Reshape", [sides, shape], "decode.bins")
        (peak,) = self.op("ReduceMax", [bins], "decode.peak", axes=[1], keepdims=1)
        (shifted,) = self.op("Sub", [bins, peak], "decode.shifted")
        (power,) = self.op("Exp", [shifted], "decode.exp")
        steps = self.const("steps", np.stack([np.arange(BINS), np.ones(BINS)]).astype(np.float32))
        (sums,) = self.op("MatMul", [steps, power], "decode.sums")
        halves = self.const("halves", np.array([1, 1], np.int64))
        first, total = self.op("Split", [sums, halves], "decode.halves", n_out=2, axis=1)
        (mean,) = self.op("Div", [first, total], "decode.mean")
        shape = self.const("sides", np.array([1, 4, anchors], np.int64))
        (dist,) = self.op("Reshape", [mean, shape], "decode.distance")
        centres, strides = anchor_points(self.height, self.width)
        sign = np.array([-1, -1, 1, 1], np.float32).reshape(1, 4, 1)
        signed = self.const("signed_strides", sign * strides)
        (offset,) = self.op("Mul", [dist, signed], "decode.offset")
        centre4 = self.const("centres", np.concatenate([centres, centres], 1))
        (boxes,) = self.op("Add", [offset, centre4], "decode.boxes")
        (both,) = self.op("Concat", [boxes, scores], "decode.both", axis=1)
        self.op("Transpose", [both], "detections", perm=[0, 2, 1])

    def model(
        self, name: str, inputs: Sequence[str], outputs: Sequence[str], rename: dict[str, str]
    ) -> onnx.ModelProto:
        """The collected graph as a checked model; `rename` maps tensors to their public names."""
        for node in self.nodes:
            for names in (node.input, node.output):
                for i, tensor in enumerate(names):
                    names[i] = rename.get(tensor, tensor)
        graph = helper.make_graph(
            self.nodes,
            name,
            [self._info(t) for t in inputs],
            [self._info(t) for t in outputs],
            list(self.initializers.values()),
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        model.ir_version, model.producer_name = 8, "perception_rt export_segments"
        onnx.checker.check_model(model, full_check=True)
        return model

    def _info(self, name: str) -> onnx.ValueInfoProto:
        if name == "image":
            shape = [1, 3, self.height, self.width]
        elif name == "detections":
            shape = [1, anchor_count(self.height, self.width), 4 + CLASSES]
        else:
            channels, stride = FEATURES[name]
            shape = [1, channels, self.height // stride, self.width // stride]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def segment_model(k: int, weights: Weights) -> onnx.ModelProto:
    """Segment k with its exit head and decode, and the features that go on."""
    g = Graph(weights)
    new, maps = segment(g, k, {n: n for n in SEGMENT_INPUTS[k]})
    assert maps is not None
    g.decode(maps)
    outputs = ("detections", *SEGMENT_FEATURES[k])
    return g.model(f"segment_{k}", SEGMENT_INPUTS[k], outputs, {v: n for n, v in new.items()})


def whole_model(
    exit_index: int, weights: Weights, height: int = HEIGHT, width: int = WIDTH
) -> onnx.ModelProto:
    """The network in one piece up to one exit, without the heads before it."""
    g = Graph(weights, height, width)
    f, maps = {"image": "image"}, None
    for k in range(exit_index + 1):
        new, maps = segment(g, k, f, head=k == exit_index)
        f.update(new)
    assert maps is not None
    g.decode(maps)
    return g.model("whole", ("image",), ("detections",), {})


def source_weights(path: Path) -> Weights:
    """The source network's convolutions as `conv<i>.weight` and `.bias`, cut to our classes."""
    model = onnx.load(path)
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    arrays.update(
        {
            n.output[0]: numpy_helper.to_array(n.attribute[0].t)
            for n in model.graph.node
            if n.op_type == "Constant"
        }
    )
    rows = [*COCO_ROWS, *range(COCO_CLASSES, COCO_CLASSES + 4 * BINS)]
    weights: Weights = {}
    for node in model.graph.node:
        if node.op_type != "Conv":
            continue
        # the converter calls them split:0, split_1:0, ...
        number = node.input[1].rpartition("/split")[2].strip("_").partition(":")[0] or "0"
        weight, bias = (np.asarray(arrays[n], np.float32) for n in node.input[1:3])
        if len(bias) == COCO_CLASSES + 4 * BINS:
            weight, bias = weight[rows], bias[rows]
        weights[f"conv{number}.weight"], weights[f"conv{number}.bias"] = weight, bias
    return weights


def session(model: Path | onnx.ModelProto, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def letterbox(image: U8, height: int = HEIGHT, width: int = WIDTH) -> tuple[U8, float, int, int]:
    """The image scaled to fit, centred on a grey canvas: canvas, scale, left, top."""
    h, w = image.shape[:2]
    scale = min(width / w, height / h)
    nw, nh = max(1, round(w * scale)), max(1, round(h * scale))
    left, top = (width - nw) // 2, (height - nh) // 2
    canvas = np.full((height, width, 3), PAD_VALUE, np.uint8)
    canvas[top : top + nh, left : left + nw] = cv2.resize(image, (nw, nh))
    return canvas, scale, left, top


def normalise(canvas: U8) -> F32:
    """BGR canvas [H, W, 3] to the network's input, float32 [1, 3, H, W]."""
    x = (canvas.astype(np.float32) - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return np.ascontiguousarray(x.transpose(2, 0, 1)[None])


def run_chain(sessions: list[ort.InferenceSession], image: F32) -> list[F32]:
    """`detections` [A, 4 + CLASSES] of every exit; features are handed on by name."""
    values: dict[str, F32] = {"image": image}
    out = []
    for s in sessions:
        names = [o.name for o in s.get_outputs()]
        values.update(zip(names, s.run(names, {i.name: values[i.name] for i in s.get_inputs()})))
        out.append(values["detections"][0])
    return out
