from __future__ import annotations

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from perception_rt.core.config import GpuOptions
from perception_rt.core.errors import ModelError, PerceptionRtError, UnavailableError
from perception_rt.detector import engine_set
from perception_rt.detector.engine_builder import BuildOptions, BuiltEngine, TensorForm
from perception_rt.detector.engine_cache import EngineCache
from perception_rt.detector.engine_set import (
    Place,
    build_engines,
    build_in_child,
    engine_key,
    find_engines,
    load_engines,
    load_kernel,
    read_choice,
    write_choice,
)
from perception_rt.detector.gpu_facts import GpuFacts
from perception_rt.detector.kernel_compiler import Cubin
from perception_rt.detector.model import Model

ORIN = GpuFacts("Orin", 87, "CUDA 12.6, L4T 36.4.3")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(ORIN, "tensorrt 10.3.0", EngineCache(tmp_path / "engines"))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, BuildOptions]]:
    """Replaces TensorRT: an engine is the ONNX file; returns what was built."""
    done: list[tuple[str, BuildOptions]] = []

    def build(trt: Any, data: bytes, options: BuildOptions, progress: Any, name: str) -> Any:
        done.append((name, options))
        graph = onnx.load_model_from_string(data).graph

        def forms(values: Any) -> tuple[TensorForm, ...]:
            return tuple(
                TensorForm(
                    v.name, tuple(d.dim_value for d in v.type.tensor_type.shape.dim), "FLOAT"
                )
                for v in values
            )

        return BuiltEngine(
            data, forms(graph.input), forms(graph.output), {"HALF": 2}, True, b"timing", (), 5
        )

    monkeypatch.setattr(engine_set, "build_segment", build)
    monkeypatch.setattr(engine_set, "engine_types", lambda trt, plan: {"fp16": 2})
    return done


def test_engines_are_built_once_and_found_again(tiny: Model, place: Place, builds) -> None:
    said: list[str] = []
    first = build_engines(None, tiny, "fp16", place, on_line=said.append)
    assert [name for name, _ in builds] == ["segment_0.onnx", "segment_1.onnx", "segment_2.onnx"]
    assert said[:2] == [
        "segment_0.onnx: building at fp16",
        "segment_0.onnx: built because no engine was built yet",
    ]
    assert [options.timing_cache for _, options in builds] == [b"", b"timing", b"timing"]
    said.clear()
    again = build_engines(None, tiny, "fp16", place, on_line=said.append)
    assert len(builds) == 3
    assert said == [f"segment_{k}.onnx: found, it fits" for k in range(3)]
    assert again.plans == first.plans
    found = find_engines(tiny, "fp16", place)
    assert (found.precision, found.plans, found.note) == ("fp16", first.plans, "")
    assert found.entries[0].info["engine_types"] == {"fp16": 2}
    assert found.entries[0].info["layer_types"] == {"HALF": 2}


def test_an_engine_of_another_gpu_or_version_is_not_taken(
    tiny: Model, place: Place, builds
) -> None:
    build_engines(None, tiny, "fp32", place)
    thor = replace(place, gpu=GpuFacts("Thor", 110, "CUDA 13.0"))
    words = (
        r"segment_0\.onnx at fp32: the engine there is for another GPU \(Orin, here Thor\).*run `"
    )
    with pytest.raises(UnavailableError, match=words):
        find_engines(tiny, "fp32", thor)
    newer = replace(place, builder="tensorrt 10.13.3")
    with pytest.raises(UnavailableError, match=r"another TensorRT \(tensorrt 10\.3\.0, here ten"):
        find_engines(tiny, "fp32", newer)


def test_auto_takes_the_measured_choice_else_what_is_there(
    tiny: Model, place: Place, builds
) -> None:
    with pytest.raises(UnavailableError, match=r"at fp16: no engine was built yet"):
        find_engines(tiny, "auto", place)
    build_engines(None, tiny, "fp32", place)
    found = find_engines(tiny, "auto", place)
    assert (found.precision, found.note) == ("fp32", "fp32: nothing was measured here yet")
    build_engines(None, tiny, "fp16", place)
    assert find_engines(tiny, "auto", place).precision == "fp16"
    write_choice(tiny, place, "fp32", [{"precision": "fp32"}])
    found = find_engines(tiny, "auto", place)
    assert found.precision == "fp32"
    assert found.note == "fp32: chosen by measurement on this machine"
    assert read_choice(tiny, replace(place, dla_core=0)) == ""  # of another device
    write_choice(tiny, place, "int8", [])  # whose engines were deleted since
    found = find_engines(tiny, "auto", place)
    assert found.precision == "fp16"
    assert found.note == "fp16: int8 was measured to be best, but its engine is gone"


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"format_version": 9, "precision": "fp16"}',
             b'{"format_version": 1, "precision": "../x"}', b'{"format_version": 1}', b"\xff"]
)  # fmt: skip
def test_a_damaged_choice_is_none(text: bytes, tiny: Model, place: Place) -> None:
    write_choice(tiny, place, "fp16", [])
    (note,) = place.cache.directory.iterdir()
    note.write_bytes(text)
    assert read_choice(tiny, place) == ""


def test_int8_engines_follow_their_calibration_frames(tiny: Model, place: Place, builds) -> None:
    """A model without convolutions has nothing to quantise, so its variant is not looked at."""

    def feeds(value: float) -> list[list[dict[str, Any]]]:
        frame = {"image": np.full((1, 3, 32, 32), value, np.float32)}
        rest = {n: np.full((1, 3, 4, 4), value, np.float32) for n in ("f0", "f1")}
        return [[frame] * 8, [{"f0": rest["f0"]}] * 8, [rest] * 8]

    build_engines(None, tiny, "int8", place, feeds(0.5))
    build_engines(None, tiny, "int8", place, feeds(0.5))
    assert len(builds) == 3
    again = build_engines(None, tiny, "int8", place, feeds(0.25))
    assert [e.reason for e in again.entries] == ["the engine was calibrated on other frames"] * 3
    build_engines(None, tiny, "int8", place)  # without frames, what is there is as good as any
    assert len(builds) == 6


def test_a_models_name_cannot_lead_out_of_the_cache(tiny: Model, place: Place) -> None:
    evil = replace(tiny, name="../../etc/[*]? x")
    assert engine_key(evil, tiny.segments[0], "fp16", place).slot == (
        "______etc______x.segment_0.fp16.gpu"
    )


def test_an_engine_that_differs_from_the_manifest_is_not_kept(
    tiny: Model, place: Place, builds
) -> None:
    wrong = replace(tiny.segments[1], output=replace(tiny.segments[1].output, shape=(1, 9, 7)))
    model = replace(tiny, segments=(tiny.segments[0], wrong))
    with pytest.raises(
        ModelError, match=r"tensor 'detections': the manifest says FLOAT \[1, 9, 7"
    ):
        build_engines(None, model, "fp32", place)
    assert isinstance(place.cache.load(engine_key(model, wrong, "fp32", place)), str)


def test_the_kernel_is_compiled_once_per_gpu(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def compile_cubin(*args: Any) -> Cubin:
        calls.append(args[1:])
        return Cubin(b"cubin", "NVRTC 12.9")

    monkeypatch.setattr(engine_set, "compile_cubin", compile_cubin)
    assert load_kernel(place.cache, ORIN).data == b"cubin"
    assert not load_kernel(place.cache, ORIN).built
    assert load_kernel(place.cache, GpuFacts("Thor", 110, "CUDA 13.0")).built
    assert calls == [("letterbox.cu", 87, 12), ("letterbox.cu", 110, 13)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, place: Place) -> GpuOptions:
    """This machine is said to be ``place``; options that name its cache."""
    monkeypatch.setattr(engine_set, "probe_gpu", lambda: ORIN)
    monkeypatch.setattr(engine_set, "import_tensorrt", lambda: None)
    monkeypatch.setattr(engine_set, "builder_name", lambda _: place.builder)
    return GpuOptions(str(place.cache.directory))


def test_plans_are_never_built_unless_asked(
    tiny: Model, place: Place, machine: GpuOptions, builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GpuOptions] = []

    def child(model: Model, options: GpuOptions) -> None:
        asked.append(options)
        build_engines(None, model, "fp16", place)

    monkeypatch.setattr(engine_set, "build_in_child", child)
    with pytest.raises(UnavailableError, match="or set build_on_configure"):
        load_engines(tiny, machine)
    assert (asked, builds) == ([], [])
    plans = load_engines(tiny, machine, build=True).plans
    assert [onnx.load_model_from_string(plan).graph.name for plan in plans] == [
        "tiny_0",
        "tiny_1",
        "tiny_2",
    ]
    assert load_engines(tiny, machine, build=True).plans == plans
    assert asked == [machine]


def python(path: Path, text: str) -> str:
    """A stand-in for the interpreter that runs a shell line with the arguments it is given."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return os.fspath(path)


def test_a_build_in_a_child_gets_everything_and_its_error_comes_out(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = GpuOptions(str(tmp_path / "cache"), "int8", 1)
    monkeypatch.setattr(sys, "executable", python(tmp_path / "ok", f'echo "$@" >{tmp_path}/seen'))
    build_in_child(tiny, options)
    assert (
        (tmp_path / "seen")
        .read_text()
        .endswith(
            f"model build {tiny.directory} --build-only --precision int8 --dla-core 1 "
            f"--engine-cache-dir {tmp_path}/cache\n"
        )
    )
    line = "echo warning >&2; echo 'error: s.onnx: out of memory' >&2; exit 69"
    monkeypatch.setattr(sys, "executable", python(tmp_path / "bad", line))
    with pytest.raises(PerceptionRtError, match=r"failed: s\.onnx: out of memory$") as error:
        build_in_child(tiny, options)
    assert error.value.exit_code == 69
    monkeypatch.setattr(sys, "executable", python(tmp_path / "crash", "kill -SEGV $$"))
    with pytest.raises(PerceptionRtError, match="failed: it ended with status -11"):
        build_in_child(tiny, options)
