from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.tiny_model import expected_detections

from perception_rt.core.errors import InputError, ModelError, UnavailableError, UsageError
from perception_rt.detector.model import Model
from perception_rt.detector.precision import Feed, calibration_feeds, has_qdq, make_variant


def images(count: int) -> list[Any]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 256, (120, 160, 3), np.uint8) for _ in range(count)]


def ramp(count: int) -> list[Feed]:
    return [{"x": np.full((1, 3, 4, 4), i - 4, np.float32)} for i in range(count)]


def types_by_op(data: bytes, op: str) -> set[int]:
    """Element types that operators of a kind compute in."""
    model = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(data), strict_mode=True)
    graph = model.graph
    infos = (*graph.value_info, *graph.input, *graph.output)
    types = {info.name: info.type.tensor_type.elem_type for info in infos}
    return {types[node.output[0]] for node in graph.node if node.op_type == op}


def run(data: bytes, feed: dict[str, Any]) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed)))


def conv_net(*, weight: float = 0.5, name: str = "conv") -> bytes:
    """x -> Conv -> LeakyRelu -> Resize -> Conv -> features; -> Sigmoid -> detections."""
    w = numpy_helper.from_array(np.full((3, 3, 1, 1), weight, np.float32), "w")
    scales = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name=name),
        helper.make_node("LeakyRelu", ["a"], ["b"], alpha=0.1),
        helper.make_node("Resize", ["b", "", "scales"], ["c"], name="resize"),
        helper.make_node("Conv", ["c", "w"], ["features"], name="conv2"),
        helper.make_node("Sigmoid", ["features"], ["detections"], name="decode"),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", TensorProto.FLOAT, [1, 3, 4, 4])],
        [
            info("features", TensorProto.FLOAT, [1, 3, 8, 8]),
            info("detections", TensorProto.FLOAT, [1, 3, 8, 8]),
        ],
        [w, scales],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString()
    return data


def test_fp32_is_the_file_as_it_is() -> None:
    assert make_variant(b"anything", "fp32") == b"anything"


def test_fp16_computes_convolutions_in_half_and_the_decode_in_float() -> None:
    data = make_variant(conv_net(), "fp16")
    onnx.checker.check_model(onnx.load_model_from_string(data), full_check=True)
    for op in ("Conv", "LeakyRelu", "Resize"):
        assert types_by_op(data, op) == {TensorProto.FLOAT16}, op
    assert types_by_op(data, "Sigmoid") == {TensorProto.FLOAT}
    graph = onnx.load_model_from_string(data).graph
    for value in (*graph.input, *graph.output):
        assert value.type.tensor_type.elem_type == TensorProto.FLOAT
    assert [(i.name, i.data_type) for i in graph.initializer] == [
        ("w@fp16", TensorProto.FLOAT16),
        ("scales", TensorProto.FLOAT),
    ]
    x = np.linspace(-1, 1, 48, dtype=np.float32).reshape(1, 3, 4, 4)
    for name, value in run(conv_net(), {"x": x}).items():
        np.testing.assert_allclose(run(data, {"x": x})[name], value, atol=2e-3)


def test_variants_are_deterministic() -> None:
    assert make_variant(conv_net(), "fp16") == make_variant(conv_net(), "fp16")
    feeds = ramp(8)
    assert make_variant(conv_net(), "int8", feeds) == make_variant(conv_net(), "int8", feeds)


def test_nodes_without_names_are_converted_too() -> None:
    assert types_by_op(make_variant(conv_net(name=""), "fp16"), "Conv") == {TensorProto.FLOAT16}


@pytest.mark.parametrize("weight", [1e5, float("nan"), float("inf")])
def test_a_weight_that_does_not_fit_into_fp16_is_named(weight: float) -> None:
    with pytest.raises(ModelError, match=r"net\.onnx: weight 'w' holds .*use --precision fp32"):
        make_variant(conv_net(weight=weight), "fp16", name="net.onnx")


def test_int8_has_symmetric_qdq_around_convolutions_only() -> None:
    feeds = ramp(8)
    data = make_variant(conv_net(), "int8", feeds)
    model = onnx.load_model_from_string(data)
    assert has_qdq(model)
    values = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    quantizers = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert len(quantizers) == 2  # the inputs of two convolutions; weights are stored quantised
    for node in (n for n in model.graph.node if n.op_type.endswith("quantizeLinear")):
        zero = values[node.input[2]]
        assert zero.dtype == np.int8
        assert not zero.any()
    readers = {tensor: n.op_type for n in model.graph.node for tensor in n.input}
    dequantized = [n.output[0] for n in model.graph.node if n.op_type == "DequantizeLinear"]
    assert {readers[tensor] for tensor in dequantized} == {"Conv"}
    assert make_variant(data, "int8") == data  # a file that has Q/DQ needs no calibration
    with pytest.raises(ModelError, match="made for --precision int8"):
        make_variant(data, "fp16")


def test_int8_without_calibration_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"s\.onnx: INT8.*at least 8 .*got 7: give --calibration"):
        make_variant(conv_net(), "int8", ramp(7), "s.onnx")


@pytest.mark.parametrize("data", [b"", b"not an onnx file", b"\x08"])
def test_a_file_that_is_no_onnx_is_one_clear_error(data: bytes) -> None:
    with pytest.raises(ModelError, match=r"^x\.onnx ") as error:
        make_variant(data, "fp16", name="x.onnx")
    assert "\n" not in str(error.value)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="precision 'fp8' is unknown: use fp32, fp16 or int8"):
        make_variant(conv_net(), "fp8")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("No module named 'onnx'"),
        AttributeError("module 'numpy' has no attribute 'exceptions'"),  # ml-dtypes, old NumPy
    ],
)
def test_tools_that_do_not_import_are_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def missing(_: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UnavailableError, match=r"onnx cannot be imported.*pip install onnx"):
        make_variant(conv_net(), "fp16")


def test_calibration_feeds_are_what_each_segment_would_get(tiny: Model) -> None:
    grey = np.full((32, 32, 3), 51, np.uint8)
    feeds = calibration_feeds(tiny, [grey, grey * 2])
    assert [sorted(segment[0]) for segment in feeds] == [["image"], ["f0"], ["f0", "f1"]]
    assert [len(segment) for segment in feeds] == [2, 2, 2]
    np.testing.assert_allclose(feeds[0][1]["image"], 0.4, rtol=1e-6)
    np.testing.assert_allclose(feeds[2][1]["f1"], 0.8, rtol=1e-6)
    with pytest.raises(InputError, match="no calibration frame"):
        calibration_feeds(tiny, [])


@pytest.mark.parametrize(
    ("precision", "score_error", "box_error"), [("fp16", 0.005, 0.1), ("int8", 0.15, 3.0)]
)
def test_every_shipped_segment_survives_the_precision(
    precision: str, score_error: float, box_error: float, nanodet: Model, repository: Any
) -> None:
    """Chained under ONNX Runtime on recorded frames: scores, and boxes of what counts."""
    from perception_rt.replay.calibration import calibration_images

    frames = calibration_images(repository / "test" / "data" / "pedestrians_mcap", 9)
    feeds = calibration_feeds(nanodet, frames[:-1])
    values = [feeds[0][0], calibration_feeds(nanodet, frames[-1:])[0][0]][1]
    exact, variant = dict(values), dict(values)
    for segment in nanodet.segments:
        data = make_variant(segment.read(), precision, feeds[segment.index], segment.path.name)
        for have, file in ((exact, segment.read()), (variant, data)):
            have.update(run(file, {spec.name: have[spec.name] for spec in segment.inputs}))
        a, b = exact["detections"][0], variant["detections"][0]
        assert np.abs(a[:, 4:] - b[:, 4:]).max() < score_error
        sure = a[:, 4:].max(1) > 0.4
        assert sure.sum() > 5
        assert np.abs(a[sure, :4] - b[sure, :4]).max() < box_error


def test_the_tiny_model_keeps_its_meaning_in_fp16(tiny: Model) -> None:
    image = np.full((1, 3, 32, 32), 0.5, np.float32)
    out = run(make_variant(tiny.segments[0].read(), "fp16"), {"image": image})
    np.testing.assert_allclose(out["detections"][0], expected_detections(0, 0.5), atol=1e-6)
