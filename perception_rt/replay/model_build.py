"""``perception_rt model build``: engines of a model on this machine, or the plan for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.config import GpuOptions
from perception_rt.core.errors import InputError, PerceptionRtError, UnavailableError, UsageError
from perception_rt.detector.engine_builder import BuildOptions, builder_name, import_tensorrt
from perception_rt.detector.engine_cache import Entry
from perception_rt.detector.engine_set import (
    UNMEASURED,
    EngineSet,
    Place,
    build_engines,
    cache_of,
    load_kernel,
    write_choice,
)
from perception_rt.detector.gpu_facts import probe_gpu
from perception_rt.detector.jetpack import (
    JETPACKS,
    JetPack,
    dla_refusal,
    find_jetpack,
    strongly_typed,
)
from perception_rt.detector.ladder import (
    LADDER,
    MAX_AP_LOSS,
    Measured,
    Step,
    climb,
    count_truths,
    find_all,
    measure,
)
from perception_rt.detector.model import Model
from perception_rt.detector.precision import Feed, calibration_feeds
from perception_rt.replay.calibration import calibration_images

if TYPE_CHECKING:
    from rich.table import Table

_PEDESTRIANS = Path(__file__).resolve().parents[2] / "test" / "data" / "pedestrians_mcap"


@dataclass(frozen=True)
class BuildRequest:
    """What a user asks for.

    Attributes:
        gpu: precision, DLA, folder.
        build_only: measure nothing.
        target_ms: latency of the whole chain at which the ladder stops; 0: none.
        max_ap_loss: largest loss of agreement with float32 at any exit.
        calibration: folder of pictures or bag; None: the pedestrians in the repository, if there.
    """

    gpu: GpuOptions
    build_only: bool = False
    target_ms: float = 0.0
    max_ap_loss: float = MAX_AP_LOSS
    calibration: Path | None = None


def plan(model: Model, request: BuildRequest, jetpack: str = "") -> dict[str, Any]:
    """What would be built, by JetPack and GPU, JSON-ready; needs neither GPU nor TensorRT.

    Args:
        jetpack: one version; empty: every one that is known.

    Raises:
        UsageError: unknown version, or a DLA asked for that this version has on no GPU.
    """
    found = [find_jetpack(jetpack)] if jetpack else list(JETPACKS)
    rows = [_plan_row(row, name, sm, request) for row in found for name, sm in row.gpus]
    if jetpack and all(row["refused"] for row in rows):
        raise UsageError(f"JetPack {found[0].version}: {rows[0]['refused']}")
    return {
        "command": "model build",
        "mode": "plan",
        "model": str(model.directory),
        "engine_cache_dir": str(cache_of(request.gpu).directory),
        "target_ms": request.target_ms,
        "max_ap_loss": request.max_ap_loss,
        "segments": [
            {"file": segment.path.name, "sha256": segment.sha256} for segment in model.segments
        ],
        "jetpacks": rows,
    }


def _plan_row(jetpack: JetPack, gpu: str, sm: int, request: BuildRequest) -> dict[str, Any]:
    dla = dla_refusal(jetpack.tensorrt, sm)
    asked = request.gpu.dla_core >= 0
    steps = [p for p in _rungs(request) if not (asked and p == "fp32")]
    refused = dla if asked else ""
    if asked and not steps:
        refused = refused or "a DLA runs FP16 and INT8 only: use --precision fp16 or int8"
    typed = strongly_typed(jetpack.tensorrt)
    flags = {"fp32": "", "fp16": "FP16", "int8": "FP16, INT8"}
    return {
        "jetpack": jetpack.version,
        "jetson_linux": jetpack.jetson_linux,
        "ubuntu": jetpack.ubuntu,
        "python": jetpack.python,
        "cuda": jetpack.cuda,
        "tensorrt": jetpack.tensorrt,
        "gpu": gpu,
        "sm": sm,
        "strongly_typed": typed,
        "dla": not dla,
        "device": f"dla{request.gpu.dla_core}" if asked else "gpu",
        "steps": []
        if refused
        else [
            {
                "precision": precision,
                "onnx": {"fp32": "as it is", "fp16": "casts", "int8": "Q/DQ"}[precision],
                "builder_flags": "" if typed else flags[precision],
                "options": BuildOptions(precision, request.gpu.dla_core).text,
            }
            for precision in steps
        ],
        "refused": refused,
    }


def build(
    model: Model,
    request: BuildRequest,
    say: Callable[[str], None],
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Build the engines, measure where that is asked for, JSON-ready; docs/json_commands.md.

    Args:
        say: told in words what is going on.
        progress: what is going on, steps done, steps in all.

    Raises:
        PerceptionRtError: no GPU, no TensorRT, bad ONNX file, out of memory, nowhere to keep it.
    """
    gpu = probe_gpu()
    trt = import_tensorrt()
    place = Place(gpu, builder_name(trt), cache_of(request.gpu), request.gpu.dla_core)
    measured = request.gpu.precision == "auto" and not request.build_only
    rungs = _rungs(request)
    images = _images(request, needed=measured) if measured or "int8" in rungs else []
    say(f"{gpu.name}, SM {gpu.sm // 10}.{gpu.sm % 10}, {gpu.driver}, {place.builder}")
    kernel = _kernel(place, say)
    feeds: list[list[Feed]] = (
        calibration_feeds(model, images) if "int8" in rungs and images else []
    )

    def engines(precision: str) -> EngineSet:
        return build_engines(trt, model, precision, place, feeds, progress, say)

    steps: list[Step] = []
    if measured:
        cubin = kernel.data if kernel else None
        chosen, steps, built = _measure(model, request, engines, images, cubin, progress)
        write_choice(model, place, chosen, [_step(step) for step in steps])
    else:
        built = _first(rungs, engines, say)
    return {
        "command": "model build",
        "mode": "build",
        "model": str(model.directory),
        "gpu": {"name": gpu.name, "sm": gpu.sm, "driver": gpu.driver},
        "builder": place.builder,
        "engine_cache_dir": str(place.cache.directory),
        "dla_core": place.dla_core,
        "precision": built.precision,
        "steps": [_step(step) for step in steps],
        "engines": [
            {
                "file": segment.path.name,
                "path": str(entry.path),
                "built": entry.built,
                "reason": entry.reason,
                "size_bytes": len(entry.data),
                **{
                    key: entry.info.get(key) for key in ("engine_types", "layer_types", "build_ns")
                },
            }
            for segment, entry in zip(model.segments, built.entries)
        ],
        "kernel": {"path": str(kernel.path), "compiler": kernel.info.get("compiler")}
        if kernel
        else None,
    }


def _kernel(place: Place, say: Callable[[str], None]) -> Entry | None:
    """The preprocess kernel; None without a compiler: preprocess then runs on the CPU."""
    try:
        return load_kernel(place.cache, place.gpu)
    except PerceptionRtError as error:
        say(f"preprocess stays on the CPU: {error}")
        return None


def _rungs(request: BuildRequest) -> tuple[str, ...]:
    asked = request.gpu.precision
    if asked != "auto":
        return (asked,)
    rungs = UNMEASURED if request.build_only else LADDER
    return tuple(p for p in rungs if p != "fp32" or request.gpu.dla_core < 0)


def _first(
    rungs: Sequence[str], engines: Callable[[str], EngineSet], say: Callable[[str], None]
) -> EngineSet:
    """The first precision that can be built here."""
    for precision in rungs[:-1]:
        try:
            return engines(precision)
        except PerceptionRtError as error:
            say(f"not {precision}: {error}")
    return engines(rungs[-1])


def _measure(
    model: Model,
    request: BuildRequest,
    engines: Callable[[str], EngineSet],
    images: Sequence[NDArray[np.uint8]],
    cubin: bytes | None,
    progress: Callable[[str, int, int], None],
) -> tuple[str, list[Step], EngineSet]:
    from perception_rt.detector.onnx_backend import OnnxBackend
    from perception_rt.detector.tensorrt_backend import TensorRtBackend

    reference_backend = OnnxBackend(model)
    try:
        reference = find_all(reference_backend, model, images)
    finally:
        reference_backend.close()
    if not count_truths(reference):
        raise InputError(
            "the network finds nothing in these pictures, so no precision can be judged by them: "
            "give a recording that shows what it knows as --calibration"
        )
    sets: dict[str, EngineSet] = {}

    def attempt(precision: str) -> Measured:
        sets[precision] = engines(precision)
        backend = TensorRtBackend(model, request.gpu, sets[precision].plans, cubin=cubin)
        try:
            return measure(
                backend,
                model,
                images,
                reference,
                progress=lambda done, total: progress(f"measuring {precision}", done, total),
            )
        finally:
            backend.close()

    chosen, steps = climb(
        _rungs(request), attempt, round(request.target_ms * NS_PER_MS), request.max_ap_loss
    )
    return chosen, steps, sets[chosen]


def _images(request: BuildRequest, needed: bool) -> list[NDArray[np.uint8]]:
    path = request.calibration
    if path is None and _PEDESTRIANS.is_dir():
        path = _PEDESTRIANS
    if path is not None:
        return calibration_images(path)
    if needed:
        raise UnavailableError(
            "measuring needs frames: give --calibration FOLDER (pictures) or BAG, or ask for "
            "--build-only or a --precision"
        )
    return []


def _step(step: Step) -> dict[str, Any]:
    measured = step.measured
    return {
        "precision": step.precision,
        "p50_ns": measured.p50_ns if measured else None,
        "p99_ns": measured.p99_ns if measured else None,
        "agreement": list(measured.agreement) if measured else None,
        "kept": step.kept,
        "why": step.why,
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """A result of ``plan`` or ``build`` for people."""
    return [_plan_table(result)] if result["mode"] == "plan" else _build_tables(result)


def _plan_table(result: dict[str, Any]) -> Table:
    table = _table(
        f"Plan: {len(result['segments'])} engines of {result['model']} at each precision",
        *("JetPack", "Linux", "GPU", "SM", "Python", "CUDA", "TensorRT", "types", "DLA", "plan"),
    )
    for row in result["jetpacks"]:
        steps = ", then ".join(
            step["precision"]
            + (f" (flags {step['builder_flags']})" if step["builder_flags"] else "")
            for step in row["steps"]
        )
        table.add_row(
            row["jetpack"],
            row["jetson_linux"],
            row["gpu"],
            f"{row['sm'] // 10}.{row['sm'] % 10}",
            row["python"],
            row["cuda"],
            row["tensorrt"],
            "of the ONNX" if row["strongly_typed"] else "of the builder",
            "yes" if row["dla"] else "no",
            f"refused: {row['refused']}" if row["refused"] else f"{row['device']}: {steps}",
        )
    target = result["target_ms"]
    table.caption = (
        (f"stops at p99 <= {target:g} ms; " if target else "all are measured; ")
        + f"kept if faster and within {result['max_ap_loss']:g} AP of float32; "
        + f"engines go to {result['engine_cache_dir']}"
    )
    return table


def _build_tables(result: dict[str, Any]) -> list[Table]:
    engines = _table(
        f"Engines at {result['precision']}, {result['gpu']['name']}, {result['builder']}",
        *("segment", "MB", "build s", "layers by type", "state", "file"),
    )
    for row in result["engines"]:
        # What the engine says of itself, else what its network asked for.
        types = row["engine_types"] or row["layer_types"] or {}
        engines.add_row(
            row["file"],
            f"{row['size_bytes'] / 1e6:.1f}",
            "-" if row["build_ns"] is None else f"{row['build_ns'] / 1e9:.1f}",
            ", ".join(f"{count} {name}" for name, count in types.items()) or "-",
            row["reason"] or "found, it fits",
            Path(row["path"]).name,
        )
    engines.caption = f"in {result['engine_cache_dir']}"
    if not result["steps"]:
        return [engines]
    ladder = _table(
        "Precisions, measured", "precision", "p50 ms", "p99 ms", "agreement", "kept", "why"
    )
    for step in result["steps"]:
        timed = step["p50_ns"] is not None
        ladder.add_row(
            step["precision"],
            f"{step['p50_ns'] / NS_PER_MS:.2f}" if timed else "-",
            f"{step['p99_ns'] / NS_PER_MS:.2f}" if timed else "-",
            " ".join(f"{value:.3f}" for value in step["agreement"]) if timed else "-",
            "yes" if step["kept"] else "no",
            step["why"],
        )
    return [ladder, engines]


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
