from __future__ import annotations

import importlib
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from perception_rt.core.errors import BackendError, ModelError, UnavailableError, UsageError
from perception_rt.detector.engine_builder import (
    BuildOptions,
    BuiltEngine,
    build_segment,
    builder_name,
    import_tensorrt,
)
from perception_rt.detector.engine_set import check_form
from perception_rt.detector.engine_types import count_types, engine_types
from perception_rt.detector.model import Model
from perception_rt.detector.precision import calibration_feeds, make_variant

# It has no timing cache and says so.
pytestmark = pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX")


@pytest.fixture(scope="module")
def rtx() -> Any:
    """TensorRT for RTX: the one builder that works without a GPU."""
    return pytest.importorskip(
        "tensorrt_rtx", reason="needs .venv-gpu (scripts/setup_gpu_checks.sh)"
    )


def network(nodes: list[Any], shape: Any = (1, 3, 8, 8)) -> bytes:
    """x -> nodes -> y."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, list(shape)) for n in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    data: bytes = model.SerializeToString()
    return data


def relu() -> bytes:
    return network([helper.make_node("Relu", ["x"], ["y"])])


# With tensorrt_rtx, on a CPU.


@pytest.mark.gpu_checks
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_shipped_segment_builds_at_every_precision(
    index: int, precision: str, rtx: Any, nanodet: Model, nanodet_feeds: Any
) -> None:
    segment = nanodet.segments[index]
    data = make_variant(segment.read(), precision, nanodet_feeds[index], segment.path.name)
    said: list[tuple[str, int, int]] = []
    built = build_segment(
        rtx, data, BuildOptions(precision), lambda *step: said.append(step), segment.path.name
    )
    assert len(built.plan) > 1_000_000
    assert built.strongly_typed
    check_form(segment, built)  # float32 where segments meet, whatever the precision
    half, quantized = built.layer_types.get("HALF", 0), built.layer_types.get("INT8", 0)
    assert (half > 30, quantized > 10) == (precision == "fp16", precision == "int8")
    assert ("building", 0, 0) in said
    assert any(done == total > 1 for _, done, total in said)
    assert engine_types(rtx, built.plan) == {}  # cannot be loaded without a GPU: says nothing


@pytest.fixture(scope="module")
def nanodet_feeds(nanodet: Model) -> Any:
    rng = np.random.default_rng(3)
    return calibration_feeds(
        nanodet, [rng.integers(0, 256, (120, 160, 3), np.uint8) for _ in range(8)]
    )


@pytest.mark.gpu_checks
@pytest.mark.parametrize(
    ("name", "label"), [("bad_one", "node 'bad_one', number 1"), ("", "node number 1")]
)
def test_an_unsupported_op_is_named_with_its_node(name: str, label: str, rtx: Any) -> None:
    data = network(
        [
            helper.make_node("Relu", ["x"], ["z"]),
            helper.make_node("NoSuchOp", ["z"], ["y"], name=name),
        ]
    )
    with pytest.raises(ModelError) as error:
        build_segment(rtx, data, BuildOptions(), name="s.onnx")
    text = str(error.value)
    assert text.startswith(
        f"s.onnx: tensorrt_rtx {rtx.__version__} does not support op 'NoSuchOp' ({label}): "
    )
    assert text.endswith("export the model without it, or use backend onnxruntime")
    assert "\n" not in text


@pytest.mark.gpu_checks
@pytest.mark.parametrize("data", [b"not an onnx file", b"\x08"])
def test_a_file_that_is_no_onnx_is_refused(data: bytes, rtx: Any) -> None:
    with pytest.raises(ModelError, match=r"s\.onnx is not an ONNX file that tensorrt_rtx .* can"):
        build_segment(rtx, data, BuildOptions(), name="s.onnx")


@pytest.mark.gpu_checks
def test_an_empty_file_is_refused(rtx: Any) -> None:
    with pytest.raises(ModelError, match="no input or no output"):
        build_segment(rtx, b"", BuildOptions())


@pytest.mark.gpu_checks
def test_dynamic_shapes_are_refused(rtx: Any) -> None:
    data = network([helper.make_node("Relu", ["x"], ["y"])], ("n", 3, 8, 8))
    with pytest.raises(ModelError, match=r"'x' has the dynamic shape \[-1, 3, 8, 8\]: export"):
        build_segment(rtx, data, BuildOptions())


@pytest.mark.gpu_checks
def test_int8_without_qdq_is_refused_with_the_remedy(rtx: Any, nanodet: Model) -> None:
    with pytest.raises(ModelError, match=r"has no Q/DQ .*--calibration FOLDER.*or use fp16"):
        build_segment(rtx, nanodet.segments[2].read(), BuildOptions("int8"))


@pytest.mark.gpu_checks
def test_running_out_of_memory_is_told_apart(rtx: Any, nanodet: Model) -> None:
    options = BuildOptions(workspace_bytes=1 << 10)
    with pytest.raises(UnavailableError, match="out of memory while building at fp32") as error:
        build_segment(rtx, nanodet.segments[2].read(), options)
    assert "\n" not in str(error.value)


@pytest.mark.gpu_checks
def test_what_progress_raises_stops_the_build_and_comes_out(rtx: Any, nanodet: Model) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_segment(rtx, nanodet.segments[0].read(), BuildOptions(), stop)
    assert build_segment(rtx, relu(), BuildOptions()).plan  # and nothing is left broken


# With a module that answers as each version does.


class Severity(IntEnum):
    ERROR = 1
    WARNING = 2

    def __str__(self) -> str:
        return f"Severity.{self.name}"  # as pybind11's enums


class Flag(IntEnum):
    FP16 = 0
    INT8 = 1
    GPU_FALLBACK = 3
    TF32 = 7


# As recorded from the wheels of 8.6.1, 10.3 to 10.16 and 11.4.
NETWORK_FLAGS = {
    "8.": {"EXPLICIT_BATCH": 0, "EXPLICIT_PRECISION": 1},
    "10": {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1},
    "11": {"STRONGLY_TYPED": 0},
    "": {},
}
TENSOR = SimpleNamespace(name="x", shape=(1, 2), dtype="DataType.FLOAT")
LAYER = SimpleNamespace(type="QUANTIZE", num_inputs=1, num_outputs=1, get_output=lambda _: TENSOR)
NETWORK = SimpleNamespace(
    num_inputs=1,
    num_outputs=1,
    num_layers=1,
    get_input=lambda _: TENSOR,
    get_output=lambda _: TENSOR,
    get_layer=lambda _: LAYER,
)


class ILogger:
    Severity = Severity


class Config(SimpleNamespace):
    """Takes the timing cache b"good" and an empty one, and makes b"new" of it."""

    def set_memory_pool_limit(self, pool: Any, size: int) -> None: ...

    def set_flag(self, flag: Flag) -> None:
        self.flags.add(flag.name)

    def clear_flag(self, flag: Flag) -> None:
        self.cleared.add(flag.name)

    def create_timing_cache(self, data: bytes) -> Any:
        return SimpleNamespace(data=data, serialize=lambda: data + b"new")

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        return cache.data in (b"", b"good") and not ignore_mismatch


class Parser:
    num_errors = 1

    def __init__(self, network: Any, logger: Any) -> None:
        self.logger = logger

    def parse(self, data: bytes) -> bool:
        if data == b"bad":
            self.logger.log(Severity.ERROR, 'While parsing node number 4 [RoiPool -> "y"]:')
            self.logger.log(Severity.ERROR, 'input: "x"\nname: "pool_7"\nop_type: "RoiPool"\n')
        return data != b"bad"

    def get_error(self, index: int) -> Any:
        return SimpleNamespace(node=lambda: 4, desc=lambda: "No importer registered\nfor it")


def fake(version: str, *, dla_cores: int = 2, plan: bytes | None = b"plan", log: Any = ()) -> Any:
    """A trt module of a version; its networks are x -> y with a QUANTIZE layer."""
    seen = SimpleNamespace(bits=None, config=Config(flags=set(), cleared=set()))

    class Builder:
        num_DLA_cores = dla_cores

        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def create_network(self, bits: int) -> Any:
            seen.bits = bits
            return NETWORK

        def create_builder_config(self) -> Config:
            return seen.config

        def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
            for line in log:
                self.logger.log(Severity.ERROR, line)
            return plan

    module: Any = ModuleType(f"fake_tensorrt_{version}_{id(seen)}")
    module.__version__ = version
    module.seen = seen
    module.ILogger, module.Builder, module.OnnxParser = ILogger, Builder, Parser
    module.NetworkDefinitionCreationFlag = SimpleNamespace(**NETWORK_FLAGS[version[:2]])
    module.BuilderFlag = Flag
    module.MemoryPoolType = SimpleNamespace(WORKSPACE=0)
    module.ProfilingVerbosity = SimpleNamespace(DETAILED=2)
    module.LayerType = SimpleNamespace(QUANTIZE="QUANTIZE")
    module.DeviceType = SimpleNamespace(DLA="DLA")
    return module


@pytest.mark.parametrize(
    ("version", "precision", "bits", "flags"),
    [
        ("8.6.1", "fp32", 0b01, set()),
        ("8.6.1", "fp16", 0b01, {"FP16"}),
        ("8.6.1", "int8", 0b01, {"FP16", "INT8"}),
        ("10.3.0", "int8", 0b11, set()),
        ("10.16.1", "fp16", 0b11, set()),
        ("11.4.1", "int8", 0b01, set()),
    ],
)
def test_each_version_gets_the_flags_it_has(
    version: str, precision: str, bits: int, flags: set[str]
) -> None:
    trt = fake(version)
    built = build_segment(trt, b"good", BuildOptions(precision))
    assert built.plan == b"plan"
    assert trt.seen.bits == bits
    assert trt.seen.config.flags == flags
    assert trt.seen.config.cleared == {"TF32"}
    assert trt.seen.config.max_aux_streams == 0
    assert built.strongly_typed is not version.startswith("8.")


@pytest.mark.parametrize(
    ("given", "kept"), [(b"", b"new"), (b"good", b"goodnew"), (b"of another GPU", b"new")]
)
def test_the_timing_cache_is_used_and_grows_or_starts_afresh(given: bytes, kept: bytes) -> None:
    built = build_segment(fake("10.3.0"), b"x", BuildOptions(timing_cache=given))
    assert built.timing_cache == kept


def test_a_dla_is_used_where_the_version_has_it() -> None:
    trt = fake("10.3.0")
    build_segment(trt, b"good", BuildOptions("fp16", dla_core=1))
    config = trt.seen.config
    assert (config.default_device_type, config.DLA_core) == ("DLA", 1)
    assert trt.seen.config.flags == {"GPU_FALLBACK"}


@pytest.mark.parametrize(
    ("version", "cores", "options", "words"),
    [
        ("10.13.3", 2, BuildOptions("fp16", dla_core=0), "TensorRT 10.13.3 has no DLA on Jetson"),
        ("10.16.1", 2, BuildOptions("int8", dla_core=0), "TensorRT 10.16.1 has no DLA on Jetson"),
        ("10.3.0", 2, BuildOptions("fp32", dla_core=0), "a DLA runs FP16 and INT8 only"),
        ("10.3.0", 2, BuildOptions("fp16", dla_core=2), "has 2 DLA cores .*: use 0 to 1"),
        ("10.3.0", 0, BuildOptions("fp16", dla_core=0), "has 0 DLA cores .*: leave out --dla-"),
    ],
)
def test_a_dla_elsewhere_is_refused(
    version: str, cores: int, options: BuildOptions, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        build_segment(fake(version, dla_cores=cores), b"good", options)


def test_an_unsupported_op_is_named_on_8_6_too() -> None:
    """That version says operator and name in its log only."""
    trt = fake("8.6.1")
    with pytest.raises(ModelError, match=r"op 'RoiPool' \(node 'pool_7', number 4\): No importer"):
        build_segment(trt, b"bad", BuildOptions())


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("Error Code 2: OutOfMemory (no further information)", UnavailableError, "out of memory"),
        ("CUDA initialization failure with error: 35", UnavailableError, "no usable GPU"),
        ("Error Code 10: Could not find any implementation", BackendError, "try another --prec"),
    ],
)
def test_a_failed_build_says_why(line: str, kind: type[Exception], words: str) -> None:
    trt = fake("10.3.0", plan=None, log=[line])
    with pytest.raises(kind, match=words) as error:
        build_segment(trt, b"good", BuildOptions("fp16"), name="s.onnx")
    assert line in str(error.value)


def test_tensorrt_that_is_missing_broken_or_too_old_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(UnavailableError, match=r"tensorrt is not installed.*python3-libnvinfer"):
        import_tensorrt()

    def broken(name: str) -> None:
        raise ImportError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(UnavailableError, match=r"does not load \(libnvinfer\.so\.10.*one version"):
        import_tensorrt()
    monkeypatch.undo()
    for version, words in (("8.5.3.1", "TensorRT 8.5.3.1 is not supported"), ("", "unknown ver")):
        monkeypatch.setitem(sys.modules, "tensorrt", fake(version))
        with pytest.raises(UnavailableError, match=words):
            import_tensorrt()
    good = fake("10.3.0")
    monkeypatch.setitem(sys.modules, "tensorrt", good)
    assert import_tensorrt() is good
    assert builder_name(good).endswith(" 10.3.0")


def test_an_engine_with_other_tensors_than_the_manifest_is_refused(tiny: Model) -> None:
    built = BuiltEngine(b"", (), (), {}, True, b"", (), 0)
    with pytest.raises(ModelError, match=r"segment_0\.onnx: tensor 'detections': the manifest"):
        check_form(tiny.segments[0], built)


def test_types_are_counted_as_the_engine_states_them() -> None:
    """Formats as TensorRT 8.6 and 10 write them."""
    layers = ",".join(
        f'{{"Name": "n", "Outputs": [{{"Name": "o", "Format/Datatype": "{text}"}}]}}'
        for text in (
            "Row major linear FP32",
            "Two wide channel vectorized row major FP16 format",
            "Half",
            "Thirty-two wide channel vectorized row major Int8 format",
            "Float",
            "Bool",
        )
    )
    text = f'{{"Layers": [{layers}, {{"Name": "m", "Outputs": []}}]}}'
    assert count_types(text) == {"fp16": 2, "fp32": 2, "int8": 1, "other": 1}


@pytest.mark.parametrize("text", ["", "{}", '{"Layers": ["name only"]}', "[]", "null"])
def test_an_engine_that_says_nothing_counts_nothing(text: str) -> None:
    assert count_types(text) == {}
