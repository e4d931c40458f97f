"""The engines of a whole model: where they are kept, whether they fit, building those that do not.

An engine is found again by the segment's sha256 in the manifest, the GPU, the driver, TensorRT and
the options; never by its date. Nothing here runs one.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perception_rt.core.config import GpuOptions
from perception_rt.core.errors import ModelError, PerceptionRtError, UnavailableError
from perception_rt.detector.engine_builder import (
    BuildOptions,
    BuiltEngine,
    Progress,
    build_segment,
    builder_name,
    describe,
    import_tensorrt,
)
from perception_rt.detector.engine_cache import (
    Built,
    EngineCache,
    EngineKey,
    Entry,
    default_cache_dir,
)
from perception_rt.detector.engine_types import engine_types
from perception_rt.detector.gpu_facts import GpuFacts, probe_gpu
from perception_rt.detector.gpu_preprocess import SOURCE_NAME, kernel_sha256, kernel_source
from perception_rt.detector.kernel_compiler import compile_cubin
from perception_rt.detector.model import Model, SegmentSpec
from perception_rt.detector.precision import Feed, make_variant

RECIPE = 1
"""Goes up whenever ``precision`` or ``engine_builder`` make another engine of the same file."""

UNMEASURED = ("fp16", "fp32")
"""What ``auto`` takes, in this order, where no choice was measured."""

_CHOICE_VERSION = 1


@dataclass(frozen=True)
class Place:
    """Where engines are to run and to be kept.

    Attributes:
        gpu: the GPU.
        builder: name and version of TensorRT.
        cache: the folder.
        dla_core: deep learning accelerator, -1: the GPU.
    """

    gpu: GpuFacts
    builder: str
    cache: EngineCache
    dla_core: int = -1


@dataclass(frozen=True)
class EngineSet:
    """The engines of every segment, in the order of running.

    Attributes:
        precision: one of ``fp32``, ``fp16``, ``int8``: what was asked of them.
        entries: by segment; ``info["engine_types"]`` says what each really runs in.
        note: how the precision came about; empty where it was asked for by name.
    """

    precision: str
    entries: tuple[Entry, ...]
    note: str = ""

    @property
    def plans(self) -> list[bytes]:
        """Serialised engines by segment."""
        return [entry.data for entry in self.entries]


def cache_of(options: GpuOptions) -> EngineCache:
    """The engine cache that the options name, else the user's."""
    named = options.engine_cache_dir
    return EngineCache(Path(named).expanduser() if named else default_cache_dir())


def load_engines(model: Model, options: GpuOptions, build: bool = False) -> EngineSet:
    """Engines for this machine.

    Args:
        model: the model.
        options: precision, DLA, folder.
        build: build what is missing, in a process of its own, which takes minutes.

    Raises:
        UnavailableError: no GPU, no driver, no TensorRT, no engine that fits (names the reason).
        PerceptionRtError: a build failed.
    """
    place = Place(
        probe_gpu(), builder_name(import_tensorrt()), cache_of(options), options.dla_core
    )
    try:
        return find_engines(model, options.precision, place)
    except UnavailableError:
        if not build:
            raise
    build_in_child(model, options)
    return find_engines(model, options.precision, place)


def find_engines(model: Model, precision: str, place: Place) -> EngineSet:
    """Engines that are already there; ``auto`` is the measured choice, else ``UNMEASURED``.

    Raises:
        UnavailableError: one is missing or does not fit; says why and what to do.
    """
    if precision != "auto":
        return _find(model, precision, place, "")
    choice = read_choice(model, place)
    notes = dict.fromkeys(UNMEASURED, "nothing was measured here yet")
    if choice:
        # It comes first; the others count where its engine was lost since.
        lost = f"{choice} was measured to be best, but its engine is gone"
        notes = {choice: "", **dict.fromkeys(UNMEASURED, lost)}
        notes[choice] = "chosen by measurement on this machine"
    error: UnavailableError | None = None
    for candidate, note in notes.items():
        try:
            return _find(model, candidate, place, f"{candidate}: {note}")
        except UnavailableError as refused:
            error = error or refused
    assert error is not None
    raise error


def _find(model: Model, precision: str, place: Place, note: str) -> EngineSet:
    entries = []
    for segment in model.segments:
        entry = place.cache.load(engine_key(model, segment, precision, place))
        if isinstance(entry, str):
            raise UnavailableError(
                f"{segment.path.name} at {precision}: {entry} ({place.cache.directory}): run "
                f"`perception_rt model build`, or set build_on_configure"
            )
        entries.append(entry)
    return EngineSet(precision, tuple(entries), note)


def engine_key(model: Model, segment: SegmentSpec, precision: str, place: Place) -> EngineKey:
    """Key of a segment's engine."""
    device = "gpu" if place.dla_core < 0 else f"dla{place.dla_core}"
    return EngineKey(
        slot=f"{_file_name(model.name)}.segment_{segment.index}.{precision}.{device}",
        source_sha256=segment.sha256,
        gpu=place.gpu.name,
        sm=place.gpu.sm,
        driver=place.gpu.driver,
        builder=place.builder,
        options=f"recipe={RECIPE} {BuildOptions(precision, place.dla_core).text}",
    )


def build_engines(
    trt: Any,
    model: Model,
    precision: str,
    place: Place,
    feeds: Sequence[Sequence[Feed]] = (),
    progress: Progress | None = None,
    on_line: Callable[[str], None] | None = None,
) -> EngineSet:
    """Find or build the engines of every segment.

    Args:
        trt: the TensorRT module.
        model: the model.
        precision: ``fp32``, ``fp16`` or ``int8``.
        place: where they run and are kept.
        feeds: calibration inputs by segment, see ``calibration_feeds``. An INT8 engine calibrated
            on other frames is built again.
        progress: told of the builder's phases.
        on_line: told in words of waiting, building and reuse.

    Raises:
        PerceptionRtError: as ``make_variant``, ``build_segment`` and ``EngineCache.get_or_build``.
    """
    calibration = _digest(feeds[0]) if feeds and precision == "int8" else ""
    timing_name = _note_name("timing", [place.gpu.name, place.gpu.sm, place.builder]) + ".cache"
    entries = []
    for segment in model.segments:

        def build(segment: SegmentSpec = segment) -> Built:
            name = segment.path.name
            if on_line is not None:
                on_line(f"{name}: building at {precision}")
            data = make_variant(
                segment.read(), precision, feeds[segment.index] if feeds else (), name
            )
            options = BuildOptions(
                precision, place.dla_core, timing_cache=place.cache.read_note(timing_name)
            )
            engine = build_segment(trt, data, options, progress, name)
            check_form(segment, engine)
            if engine.timing_cache:
                place.cache.write_note(timing_name, engine.timing_cache)
            info = {
                **describe(engine),
                "engine_types": engine_types(trt, engine.plan),
                "variant_sha256": hashlib.sha256(data).hexdigest(),
                "calibration_sha256": calibration,
            }
            return Built(engine.plan, info)

        def refuse(info: dict[str, Any]) -> str:
            same = not calibration or info.get("calibration_sha256") == calibration
            return "" if same else "the engine was calibrated on other frames"

        entry = place.cache.get_or_build(
            engine_key(model, segment, precision, place), build, on_line, refuse
        )
        if on_line is not None:
            on_line(
                f"{segment.path.name}: "
                + (f"built because {entry.reason}" if entry.built else "found, it fits")
            )
        entries.append(entry)
    return EngineSet(precision, tuple(entries))


def check_form(segment: SegmentSpec, engine: BuiltEngine) -> None:
    """Compare an engine's tensors with the manifest.

    Raises:
        ModelError: one differs by name, shape or type.
    """
    found = {t.name: f"{t.dtype} {list(t.shape)}" for t in (*engine.inputs, *engine.outputs)}
    specs = (*segment.inputs, *segment.features, segment.output)
    want = {spec.name: f"FLOAT {list(spec.shape)}" for spec in specs}
    for name in sorted(found.keys() | want.keys()):
        if found.get(name) != want.get(name):
            raise ModelError(
                f"{segment.path}: tensor '{name}': the manifest says {want.get(name, 'none')}, "
                f"the engine has {found.get(name, 'none')}: export the model again"
            )


def load_kernel(cache: EngineCache, gpu: GpuFacts) -> Entry:
    """The compiled preprocess kernel, found or compiled.

    Raises:
        UnavailableError: no CUDA compiler for this GPU, or the folder cannot be written.
        BackendError: the compiler refuses the source.
    """

    def build() -> Built:
        cubin = compile_cubin(kernel_source(), SOURCE_NAME, gpu.sm, gpu.cuda_major or None)
        return Built(cubin.data, {"compiler": cubin.compiler})

    return cache.get_or_build(_kernel_key(gpu), build)


def find_kernel(cache: EngineCache, gpu: GpuFacts) -> Entry | str:
    """The compiled preprocess kernel, or why there is none: compiles nothing, waits for nobody."""
    found = cache.load(_kernel_key(gpu))
    if isinstance(found, str):
        return f"its kernel: {found}: run `perception_rt model build`"
    return found


def _kernel_key(gpu: GpuFacts) -> EngineKey:
    return EngineKey("kernel.letterbox", kernel_sha256(), gpu.name, gpu.sm, gpu.driver, "cubin")


def read_choice(model: Model, place: Place) -> str:
    """The precision that was measured to be best for this model here; empty: none was."""
    try:
        record = json.loads(place.cache.read_note(_choice_name(model, place)))
        known = record["format_version"] == _CHOICE_VERSION
        precision = record["precision"] if known else ""
    except (ValueError, KeyError, TypeError):
        return ""
    return precision if precision in ("fp32", "fp16", "int8") else ""


def write_choice(model: Model, place: Place, precision: str, report: list[dict[str, Any]]) -> None:
    """Keep the measured choice and how it came about.

    Raises:
        UnavailableError: the folder cannot be written.
    """
    record = {"format_version": _CHOICE_VERSION, "precision": precision, "steps": report}
    place.cache.write_note(
        _choice_name(model, place), (json.dumps(record, indent=1) + "\n").encode()
    )


def build_in_child(model: Model, options: GpuOptions) -> None:
    """Run ``perception_rt model build --build-only`` and wait for it.

    A process of its own: TensorRT's builder logs through Python, takes memory that it keeps, and
    may crash.

    Raises:
        PerceptionRtError: it failed; the message is its last line.
    """
    command = [
        *(
            sys.executable,
            "-c",
            "import sys; from perception_rt.cli import main; sys.exit(main())",
        ),
        *("model", "build", str(model.directory), "--build-only"),
        *("--precision", options.precision, "--dla-core", str(options.dla_core)),
        *("--engine-cache-dir", str(cache_of(options).directory)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        error = PerceptionRtError(f"building engines failed: {lines[-1].removeprefix('error: ')}")
        error.exit_code = done.returncode if done.returncode > 0 else error.exit_code
        raise error


def _choice_name(model: Model, place: Place) -> str:
    facts = [model.manifest_sha256, place.gpu.name, place.gpu.sm, place.gpu.driver, place.builder]
    return _note_name(f"choice.{_file_name(model.name)}", [*facts, place.dla_core]) + ".json"


def _note_name(kind: str, facts: list[Any]) -> str:
    return f"{kind}.{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


def _file_name(text: str) -> str:
    """A manifest's name comes from elsewhere: only what is safe in a file name stays."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)[:64]


def _digest(feeds: Sequence[Feed]) -> str:
    digest = hashlib.sha256()
    for feed in feeds:
        for name in sorted(feed):
            digest.update(feed[name].tobytes())
    return digest.hexdigest()
