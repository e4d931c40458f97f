"""Engines of the shipped model for the GPU tests, built in a process of their own (TensorRT keeps
one logger per process, and building wants another than running).

    python test/support/gpu_engines.py MODEL_FOLDER PRECISION OUT_FOLDER

leaves ``segment_K.plan``, ``whole.plan`` (all segments and heads in one engine), the ONNX files
that they were built from, and ``built.json``, which says how.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from perception_rt.core.errors import UnavailableError
from perception_rt.detector.engine_builder import BuildOptions, build_segment, import_tensorrt
from perception_rt.detector.model import Model, load_model
from perception_rt.detector.precision import calibration_feeds, make_variant

CALIBRATION_FRAMES = 8
OPTIMIZATION_LEVEL = 2
"""Lower than in production: the checks have minutes, not the best engines."""

RECORDING = Path(__file__).parents[1] / "data" / "pedestrians_mcap" / "pedestrians_mcap.mcap"
_JPEG = b"\xff\xd8\xff"


def find_tensorrt() -> Any:
    """``tensorrt``, else ``tensorrt_rtx``, which has the same names.

    Raises:
        UnavailableError: neither is there.
    """
    try:
        return import_tensorrt()
    except UnavailableError as error:
        try:
            return importlib.import_module("tensorrt_rtx")
        except ImportError:
            raise error from None


def pictures(count: int) -> list[NDArray[np.uint8]]:
    """The first frames of the recording, uint8 [height, width, 3], BGR; found by their JPEG
    headers, so that no bag reader is needed.
    """
    data = RECORDING.read_bytes()
    found: list[NDArray[np.uint8]] = []
    begin = data.find(_JPEG)
    while begin >= 0 and len(found) < count:
        end = data.find(_JPEG, begin + 1)
        packed = np.frombuffer(data[begin : end if end > 0 else None], np.uint8)
        decoded = cv2.imdecode(packed, cv2.IMREAD_COLOR)
        if decoded is not None:
            found.append(decoded.astype(np.uint8, copy=False))
        begin = end
    return found


def whole(segments: list[bytes], model: Model) -> bytes:
    """All segments as one ONNX file; the head of segment k is called ``detections_K``."""
    import onnx

    shared = {t.name for segment in model.segments for t in (*segment.inputs, *segment.features)}
    joined = onnx.load_model_from_string(segments[0])
    graph = joined.graph
    outputs: list[Any] = []
    nodes: list[Any] = []
    initializers: list[Any] = []
    for k, data in enumerate(segments):
        piece = onnx.load_model_from_string(data).graph

        def renamed(name: str, k: int = k) -> str:
            if name in shared or not name:
                return name
            return f"detections_{k}" if name == model.output_name else f"s{k}/{name}"

        for node in piece.node:
            node.name = f"s{k}/{node.name}"
            node.input[:] = [renamed(name) for name in node.input]
            node.output[:] = [renamed(name) for name in node.output]
            nodes.append(node)
        for initializer in piece.initializer:
            initializer.name = renamed(initializer.name)
            initializers.append(initializer)
        head = next(output for output in piece.output if output.name == model.output_name)
        head.name = f"detections_{k}"
        outputs.append(head)
    del graph.node[:], graph.initializer[:], graph.output[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.extend(initializers)
    graph.output.extend(outputs)
    onnx.checker.check_model(joined, full_check=True)
    result: bytes = joined.SerializeToString()
    return result


def build(model: Model, precision: str, out: Path) -> None:
    """Build everything for one precision."""
    trt = find_tensorrt()
    feeds = calibration_feeds(model, pictures(CALIBRATION_FRAMES)) if precision == "int8" else None
    files = [
        make_variant(segment.read(), precision, feeds[segment.index] if feeds else ())
        for segment in model.segments
    ]
    report: dict[str, Any] = {"builder": f"{trt.__name__} {trt.__version__}", "build_s": {}}
    cache = b""
    for name, data in [
        *((f"segment_{k}", data) for k, data in enumerate(files)),
        ("whole", whole(files, model)),
    ]:
        options = BuildOptions(
            precision, optimization_level=OPTIMIZATION_LEVEL, timing_cache=cache
        )
        built = build_segment(trt, data, options, name=name)
        cache = built.timing_cache
        (out / f"{name}.plan").write_bytes(built.plan)
        (out / f"{name}.onnx").write_bytes(data)
        report["build_s"][name] = round(built.build_ns / 1e9, 1)
    (out / "built.json").write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    build(load_model(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
