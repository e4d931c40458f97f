from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import pytest

from perception_rt.cli import run
from perception_rt.core.config import GpuOptions
from perception_rt.core.errors import BackendError, InputError, UnavailableError, UsageError
from perception_rt.detector import engine_set
from perception_rt.detector.engine_cache import EngineCache, Entry
from perception_rt.detector.engine_set import EngineSet, Place, read_choice
from perception_rt.detector.gpu_facts import GpuFacts
from perception_rt.detector.kernel_compiler import Cubin
from perception_rt.detector.ladder import measure
from perception_rt.detector.model import Model, load_model
from perception_rt.detector.onnx_backend import OnnxBackend
from perception_rt.replay import model_build
from perception_rt.replay.model_build import BuildRequest, build, plan

MODEL = Path(__file__).resolve().parents[2] / "models" / "nanodet_g_416_coco80"
ORIN = GpuFacts("Orin", 87, "CUDA 12.6, L4T 36.4.3")


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(MODEL)


def request(precision: str = "auto", dla_core: int = -1, **more: Any) -> BuildRequest:
    return BuildRequest(GpuOptions("/cache", precision, dla_core), **more)


def steps(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(step["precision"], step["builder_flags"]) for step in row["steps"]]


def test_the_plan_has_a_row_for_each_jetpack_and_gpu(model: Model) -> None:
    result = plan(model, request())
    rows = {(row["jetpack"], row["gpu"]): row for row in result["jetpacks"]}
    assert list(rows) == [
        ("6.0", "Orin"),
        ("6.1", "Orin"),
        ("6.2", "Orin"),
        ("7.0", "Thor"),
        ("7.1", "Thor"),
        ("7.2", "Orin"),
        ("7.2", "Thor"),
        ("7.2.2", "Orin"),
        ("7.2.2", "Thor"),
    ]
    assert steps(rows["6.0", "Orin"]) == [("fp32", ""), ("fp16", "FP16"), ("int8", "FP16, INT8")]
    assert steps(rows["7.1", "Thor"]) == [("fp32", ""), ("fp16", ""), ("int8", "")]
    assert [row["dla"] for row in rows.values()] == [
        True, True, True, False, False, False, False, True, False,
    ]  # fmt: skip
    assert [segment["file"] for segment in result["segments"]] == [
        "segment_0.onnx",
        "segment_1.onnx",
        "segment_2.onnx",
    ]
    json.dumps(result)


def test_a_plan_for_the_dla_leaves_out_fp32_and_says_where_there_is_none(model: Model) -> None:
    rows = plan(model, request(dla_core=0))["jetpacks"]
    assert [(row["jetpack"], row["gpu"]) for row in rows if not row["refused"]] == [
        ("6.0", "Orin"),
        ("6.1", "Orin"),
        ("6.2", "Orin"),
        ("7.2.2", "Orin"),
    ]
    assert steps(rows[2]) == [("fp16", ""), ("int8", "")]
    assert "TensorRT 10.16.1 has no DLA" in rows[5]["refused"]
    with pytest.raises(UsageError, match=r"JetPack 7\.1: a GPU with SM 11\.0 comes without"):
        plan(model, request(dla_core=0), "7.1")
    with pytest.raises(UsageError, match="a DLA runs FP16 and INT8 only"):
        plan(model, request("fp32", dla_core=0), "6.2")


@pytest.mark.parametrize("arguments", [[], ["--jetpack", "6.2"], ["--precision", "int8"]])
def test_the_plan_is_printed_without_gpu_and_tensorrt(
    arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "plan.json")
    assert run(["model", "build", str(MODEL), "--dry-run", "--json", out, *arguments]) == 0
    text, err = capfd.readouterr()
    assert err == ""
    assert "10.3.0" in text
    assert "int8" in text
    assert json.loads(Path(out).read_text())["mode"] == "plan"
    assert ("7.2.2" in text) is ("--jetpack" not in arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jetpack", "6.2"], "--jetpack needs --dry-run"),
        (["--dry-run", "--jetpack", "5.1"], "JetPack '5.1' is unknown: use one of 6.0"),
        (["--dry-run", "--precision", "fp8"], "precision 'fp8' is unknown"),
        (["--dry-run", "--dla-core", "-2"], "'--dla-core'"),
        (["--dry-run", "--target-ms", "-1"], "'--target-ms'"),
        (["--dry-run", "--max-ap-loss", "2"], "'--max-ap-loss'"),
        (["--json", "/nowhere/a.json"], "cannot be written"),
    ],
)
def test_usage_errors_are_one_line_and_exit_64(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["model", "build", str(MODEL), *arguments]) == 64
    _, err = capfd.readouterr()
    assert err.count("\n") == 1
    assert words in err


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with an Orin and a TensorRT; the kernel needs no compiler there."""
    trt = ModuleType("tensorrt")
    trt.__version__ = "10.3.0"  # type: ignore[attr-defined]
    monkeypatch.setattr(model_build, "probe_gpu", lambda: ORIN)
    monkeypatch.setattr(model_build, "import_tensorrt", lambda: trt)
    monkeypatch.setattr(engine_set, "compile_cubin", lambda *_: Cubin(b"cubin", "NVRTC 12.9"))
    return trt


@pytest.mark.parametrize(
    ("what", "words"), [("probe_gpu", "no NVIDIA driver"), ("import_tensorrt", "tensorrt is not")]
)
def test_without_gpu_or_tensorrt_it_is_one_line_and_exits_69(
    what: str,
    words: str,
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def missing() -> None:
        raise UnavailableError(words)

    monkeypatch.setattr(model_build, what, missing)
    assert run(["model", "build", str(MODEL)]) == 69
    assert capfd.readouterr().err == f"error: {words}\n"


def engine_sets(monkeypatch: pytest.MonkeyPatch, fails: tuple[str, ...] = ()) -> list[str]:
    """Replaces the building; returns the precisions that were built."""
    built: list[str] = []

    def build_engines(
        trt: Any, model: Model, precision: str, place: Place, *rest: Any
    ) -> EngineSet:
        if precision in fails:
            raise BackendError(f"no {precision} here")
        built.append(precision)
        entry = Entry(b"plan", {"layer_types": {"HALF": 2}}, Path("/c/e.plan"), True, "new")
        return EngineSet(precision, (entry,) * len(model.segments))

    monkeypatch.setattr(model_build, "build_engines", build_engines)
    return built


def quiet(*_: Any) -> None: ...


def test_build_only_builds_one_precision_and_measures_nothing(
    machine: Any, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = engine_sets(monkeypatch)
    options = GpuOptions(str(tmp_path))
    result = build(model, BuildRequest(options, build_only=True), quiet, quiet)
    assert (built, result["precision"], result["steps"]) == (["fp16"], "fp16", [])
    assert [engine["path"] for engine in result["engines"]] == ["/c/e.plan"] * 3
    assert result["kernel"]["compiler"] == "NVRTC 12.9"
    json.dumps(result)


def test_without_a_cuda_compiler_engines_are_built_all_the_same(
    machine: Any, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*_: Any) -> Cubin:
        raise UnavailableError("no CUDA compiler")

    monkeypatch.setattr(engine_set, "compile_cubin", no_compiler)
    engine_sets(monkeypatch)
    said: list[str] = []
    request = BuildRequest(GpuOptions(str(tmp_path)), build_only=True)
    result = build(model, request, said.append, quiet)
    assert result["kernel"] is None
    assert "preprocess stays on the CPU: no CUDA compiler" in said


def test_build_only_falls_back_to_fp32_and_says_why(
    machine: Any, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = engine_sets(monkeypatch, fails=("fp16",))
    said: list[str] = []
    options = GpuOptions(str(tmp_path))
    result = build(model, BuildRequest(options, build_only=True), said.append, quiet)
    assert (built, result["precision"]) == (["fp32"], "fp32")
    assert "not fp16: no fp16 here" in said


def test_auto_measures_every_precision_and_keeps_the_choice(
    machine: Any, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime stands for the GPU, so which of two equal precisions is faster is open."""

    class Backend(OnnxBackend):
        def __init__(
            self, model: Model, options: GpuOptions, plans: list[bytes], *, cubin: bytes
        ) -> None:
            assert (plans, cubin) == ([b"plan"] * 3, b"cubin")
            super().__init__(model)

    module = ModuleType("perception_rt.detector.tensorrt_backend")
    module.TensorRtBackend = Backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(model_build, "measure", partial(measure, runs=2))
    monkeypatch.setattr("perception_rt.detector.ladder.WARMUP_RUNS", 1)
    pictures = [np.zeros((60, 80, 3), np.uint8)] * 8
    monkeypatch.setattr(model_build, "calibration_images", lambda path: pictures)
    built = engine_sets(monkeypatch, fails=("int8",))
    request = BuildRequest(GpuOptions(str(tmp_path)), calibration=tmp_path)
    with pytest.raises(InputError, match="the network finds nothing in these pictures"):
        build(model, request, quiet, quiet)
    monkeypatch.setattr(model_build, "count_truths", lambda _reference: 1)
    result = build(model, request, quiet, quiet)
    assert built == ["fp32", "fp16"]
    assert [step["precision"] for step in result["steps"]] == ["fp32", "fp16", "int8"]
    assert result["steps"][0]["agreement"] == [1.0, 1.0, 1.0]
    assert result["steps"][2]["why"] == "no int8 here"
    place = Place(ORIN, "tensorrt 10.3.0", EngineCache(tmp_path))
    assert read_choice(model, place) == result["precision"]
    assert model_build.tables(result)


def test_measuring_needs_frames(
    machine: Any, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_build, "_PEDESTRIANS", tmp_path / "not installed")
    with pytest.raises(UnavailableError, match="measuring needs frames: give --calibration"):
        build(model, BuildRequest(GpuOptions(str(tmp_path))), quiet, quiet)


@pytest.mark.gpu_checks
@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX")
def test_the_command_builds_the_shipped_model_once(
    machine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rtx = pytest.importorskip("tensorrt_rtx", reason="needs .venv-gpu")
    monkeypatch.setattr(model_build, "import_tensorrt", lambda: rtx)
    cache, out = tmp_path / "cache", tmp_path / "out.json"
    command = ["model", "build", str(MODEL), "--build-only", "--precision", "int8", "--json"]
    command += [str(out), "--engine-cache-dir", str(cache), "--calibration", str(tmp_path)]
    for i in range(8):
        cv2.imwrite(str(tmp_path / f"{i}.png"), np.full((60, 80, 3), 30 * i, np.uint8))
    assert run(command) == 0
    first = json.loads(out.read_text())
    assert [engine["built"] for engine in first["engines"]] == [True] * 3
    assert all(engine["layer_types"]["INT8"] > 10 for engine in first["engines"])
    assert all(Path(engine["path"]).stat().st_size > 1_000_000 for engine in first["engines"])
    _, err = capfd.readouterr()
    assert "Orin, SM 8.7, CUDA 12.6, L4T 36.4.3, tensorrt_rtx" in err
    assert run(command) == 0
    assert [engine["built"] for engine in json.loads(out.read_text())["engines"]] == [False] * 3
    assert "segment_2.onnx: found, it fits" in capfd.readouterr().err
