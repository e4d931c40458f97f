"""A model directory of three tiny ONNX segments, so that tests need no real network.

Input [1, 3, 32, 32], normalised to pixel / 255; strides 8 and 16: 20 anchors; 3 classes. With m
the mean of the normalised input, exit k has k + 1 objects: anchor i < k + 1 has box
(4 + 8 i, 8, 10 + 8 i, 16) + (k + 1) m and scores 0.9 for class i; every other anchor has the box
(0, 0, 1, 1) + (k + 1) m and scores 0. Segment 2 reads features of both segments before it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

SIZE = 32
ANCHORS = 20
CLASSES = 3
LABELS = ("person", "car", "dog")
F32 = NDArray[np.float32]


def base_detections(k: int) -> F32:
    """Exit ``k``'s detection tensor for a black image, float32 [1, 20, 7]."""
    out = np.zeros((1, ANCHORS, 4 + CLASSES), np.float32)
    out[0, :, 2:4] = 1
    for i in range(k + 1):
        out[0, i, :4] = 4 + 8 * i, 8, 10 + 8 * i, 16
        out[0, i, 4 + i] = 0.9
    return out


def expected_detections(k: int, mean: float) -> F32:
    """Exit ``k``'s detection tensor, float32 [20, 7], where the normalised input has that mean."""
    out = base_detections(k)[0]
    out[:, :4] += np.float32((k + 1) * mean)
    return out


def write_tiny_model(directory: Path, *, fails_when_bright: bool = False) -> Path:
    """Write the model; ``fails_when_bright``: segment 1 raises from a mean of 128 on."""
    directory.mkdir(parents=True, exist_ok=True)
    shapes = {
        "image": [1, 3, SIZE, SIZE],
        "f0": [1, 3, 4, 4],
        "f1": [1, 3, 4, 4],
        "detections": [1, ANCHORS, 4 + CLASSES],
    }
    inputs = [["image"], ["f0"], ["f0", "f1"]]
    features = [["f0"], ["f1"], []]
    segments = []
    for k in range(3):
        model = _segment(
            k, inputs[k], [*features[k], "detections"], shapes, fails_when_bright and k == 1
        )
        path = directory / f"segment_{k}.onnx"
        onnx.save(model, str(path))
        segments.append(
            {
                "file": path.name,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "size_bytes": path.stat().st_size,
                "inputs": [_tensor(name, shapes) for name in inputs[k]],
                "features": [_tensor(name, shapes) for name in features[k]],
                "exit": {
                    "anchors": ANCHORS,
                    "strides": [8, 16],
                    "trained_classes": list(range(k + 1)),
                    "cost_ms_median": None if k == 2 else 0.5,
                    "ap50": {"nowhere": 0.25},
                },
            }
        )
    labels = directory / "labels.txt"
    labels.write_text("\n".join(LABELS) + "\n", encoding="utf-8")
    manifest = {
        "format_version": 1,
        "name": "tiny",
        "version": "1.2.3",
        "input": {
            **_tensor("image", shapes),
            "color": "BGR",
            "mean": [0.0, 0.0, 0.0],
            "std": [255.0, 255.0, 255.0],
            "pad_value": 114,
        },
        "output": {"name": "detections", "box": "ltrb_input_pixels", "classes": CLASSES},
        "labels": {
            "file": "labels.txt",
            "sha256": hashlib.sha256(labels.read_bytes()).hexdigest(),
        },
        "segments": segments,
        "licence": "Apache-2.0",
        "origin": "made by a test",
        "training": {"steps": 0},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return directory


def _tensor(name: str, shapes: dict[str, list[int]]) -> dict[str, Any]:
    return {"name": name, "shape": shapes[name], "dtype": "float32"}


def _segment(
    k: int, inputs: list[str], outputs: list[str], shapes: dict[str, list[int]], fails: bool
) -> onnx.ModelProto:
    moves = np.zeros((1, ANCHORS, 4 + CLASSES), np.float32)
    moves[..., :4] = k + 1
    constants: dict[str, NDArray[Any]] = {
        "base": base_detections(k),
        "moves": moves,
        "two": np.array(2, np.float32),
        "one_row": np.ones((1, 1, 1), np.float32),
        "shape": np.array([1, 1, 1], np.int64),
    }
    # f0: means of 8 x 8 pixels; f1 = 2 f0; segment 2 takes f1 - f0
    feature = {
        0: [
            helper.make_node("AveragePool", ["image"], ["f0"], kernel_shape=[8, 8], strides=[8, 8])
        ],
        1: [helper.make_node("Mul", ["f0", "two"], ["f1"])],
        2: [helper.make_node("Sub", ["f1", "f0"], ["difference"])],
    }[k]
    source = ("f0", "f0", "difference")[k]
    nodes = [
        *feature,
        helper.make_node("ReduceMean", [source], ["mean4"], keepdims=1),
        helper.make_node("Reshape", ["mean4", "shape"], ["mean"]),
        helper.make_node("Mul", ["moves", "mean"], ["moved"]),
        helper.make_node("Add", ["base", "moved"], ["answer"]),
    ]
    if fails:
        # floor(2 m) as a row number of a tensor with one row: out of range from m = 0.5 on
        nodes += [
            helper.make_node("Mul", ["mean", "two"], ["doubled"]),
            helper.make_node("Cast", ["doubled"], ["row"], to=TensorProto.INT64),
            helper.make_node("Reshape", ["row", "flat"], ["row1"]),
            helper.make_node("Gather", ["one_row", "row1"], ["factor"], axis=0),
            helper.make_node("Mul", ["answer", "factor"], ["detections"]),
        ]
        constants["flat"] = np.array([1], np.int64)
    else:
        nodes.append(helper.make_node("Identity", ["answer"], ["detections"]))
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        f"tiny_{k}",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in outputs],
        [
            numpy_helper.from_array(value, name)
            for name, value in constants.items()
            if name in used
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model
