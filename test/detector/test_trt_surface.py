"""Every name of TensorRT, pycuda and cuda-bindings that our source uses exists where it will run.

The names are read from the source. Those of TensorRT are looked up in what five versions of its
Python package were seen to have (``test/data/trt_api``), the others in the installed packages.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
from support.standin_trt import Context, Engine, Runtime, StandInTrt

DETECTOR = Path(__file__).parents[2] / "perception_rt" / "detector"
RECORDS = Path(__file__).parents[1] / "data" / "trt_api"
VERSIONS = ("8.6.1", "10.3.0", "10.13.3.9", "10.16.1.11", "11.4.0.106")
SOURCES = ("gpu_network.py", "engine_builder.py", "engine_types.py")

TENSORRT = {
    "trt": "",
    "self._trt": "",
    "builder": "Builder",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "error": "ParserError",
    "inspector": "EngineInspector",
    "layer": "ILayer",
    "mode": "TensorIOMode",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "runtime": "Runtime",
    "self._runtime": "Runtime",
    "timing_cache": "ITimingCache",
}
"""What a variable of that name is, where it is anything of TensorRT."""

NOT_TENSORRT = {"__name__", "__version__", "__cause__", "__context__", "with_traceback"}

WHERE_ASKED_FIRST = {
    "8.6.1": {
        "IProgressMonitor",
        "IProgressMonitor.__init__",
        "IBuilderConfig.progress_monitor",
        "ParserError.node_name",
        "ParserError.node_operator",
    },
    "10.3.0": set(),
    "10.13.3.9": set(),
    "10.16.1.11": set(),
    "11.4.0.106": {"BuilderFlag.FP16", "BuilderFlag.INT8"},
}
"""What a version lacks; the source asks for the name, or for the version, before it uses it."""


def attributes(source):
    """(receiver as written, attribute) of every attribute in a source file."""
    tree = ast.parse((DETECTOR / source).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr


def tensorrt_names():
    """As the source uses them: ``ICudaEngine.num_io_tensors``, ``TensorIOMode.INPUT``."""
    names = set()
    for source in SOURCES:
        for receiver, attribute in attributes(source):
            if attribute in NOT_TENSORRT:
                continue
            if receiver in TENSORRT:
                kind = TENSORRT[receiver]
                names.add(f"{kind}.{attribute}" if kind else attribute)
            for prefix in ("trt.", "self._trt."):
                if receiver.startswith(prefix) and "(" not in receiver:
                    names.add(f"{receiver[len(prefix) :]}.{attribute}")
    return names


@pytest.fixture(params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture
def surface(version):
    record = json.loads((RECORDS / f"tensorrt_{version}.json").read_text(encoding="utf-8"))
    assert record["version"].startswith(version.rpartition(".")[0])
    names = set(record["top"])
    for groups in (record["classes"], record["enums"]):
        for group, members in groups.items():
            names |= {f"{group}.{member}" for member in members}
    # Severity is an enumeration within ILogger; its members are those of ILogger as well.
    names |= {f"ILogger.Severity.{m}" for m in record["classes"]["ILogger"] if m.isupper()}
    return names


def test_the_reader_finds_what_is_used():
    names = tensorrt_names()
    assert len(names) >= 50
    assert {
        "Runtime",
        "Runtime.deserialize_cuda_engine",
        "ICudaEngine.create_execution_context",
        "ICudaEngine.get_tensor_dtype",
        "IExecutionContext.set_tensor_address",
        "IExecutionContext.execute_async_v3",
        "TensorIOMode.INPUT",
        "nptype",
        "Builder.build_serialized_network",
        "BuilderFlag.TF32",
        "OnnxParser.parse",
    } <= names


def test_no_call_of_tensorrt_goes_through_a_variable_that_the_reader_does_not_know():
    telling = ("get_tensor_", "set_tensor_", "execute_", "create_", "deserialize_", "build_serial")
    known = {"self", "ctypes", *TENSORRT}
    strange = [
        (source, receiver, attribute)
        for source in (path.name for path in DETECTOR.glob("*.py"))
        for receiver, attribute in attributes(source)
        if attribute.startswith(telling) and receiver not in known
    ]
    assert strange == []


def test_every_name_exists_in_every_version(version, surface):
    assert tensorrt_names() - surface == WHERE_ASKED_FIRST[version]


def test_the_stand_in_has_no_name_that_tensorrt_lacks(surface):
    for kind, stand_in in (
        ("Runtime", Runtime),
        ("ICudaEngine", Engine),
        ("IExecutionContext", Context),
    ):
        names = {name for name in vars(stand_in) if not name.startswith("_")}
        assert names
        assert {f"{kind}.{name}" for name in names} <= surface
    assert {"Runtime", "Logger", "TensorIOMode", "DataType", "nptype"} <= surface & set(
        vars(StandInTrt)
    )


def installed(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if Path(sys.prefix).name == ".venv-gpu":
            pytest.fail(f"{error}: run scripts/setup_gpu_checks.sh")
        pytest.skip(str(error))


@pytest.mark.gpu_checks
def test_every_name_of_pycuda_exists():
    driver = installed("pycuda.driver")
    objects = {
        "cuda": driver,
        "self._cuda": driver,
        "device": driver.Device,
        "self._stream": driver.Stream,
        "self._module": driver.Module,
        "self._kernel": driver.Function,
        "self._context": driver.Context,
        "current": driver.Context,
        "cuda.device_attribute": driver.device_attribute,
        "cuda.event_flags": driver.event_flags,
        "cuda.host_alloc_flags": driver.host_alloc_flags,
        "array.base": driver.PagelockedHostAllocation,
    }
    used = [pair for pair in attributes("gpu_network.py") if pair[0] in objects]
    assert ("self._cuda", "memcpy_dtoh_async") in used
    assert ("self._stream", "is_done") in used
    assert [pair for pair in used if not hasattr(objects[pair[0]], pair[1])] == []
    assert {"record", "query"} <= set(dir(driver.Event))


@pytest.mark.gpu_checks
def test_every_name_of_cuda_bindings_exists():
    bindings = installed("cuda.bindings.driver")
    tree = ast.parse((DETECTOR / "cuda_graphs.py").read_text(encoding="utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {text for text in texts if isinstance(text, str) and text.startswith("cu")}
    names = {name for name in names if name.isidentifier()}
    names |= {a for r, a in attributes("cuda_graphs.py") if r in ("bindings", "self._bindings")}
    assert {"cuStreamBeginCapture", "cuGraphLaunch", "cuGraphInstantiate", "CUstream"} <= names
    assert [name for name in sorted(names) if not hasattr(bindings, name)] == []
    flags = bindings.CUgraphInstantiate_flags
    assert int(flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY) == 8
    assert int(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING) == 1
