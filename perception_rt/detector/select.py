"""Choice of backends by name, and by what loads here; only what is chosen is imported."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.config import BACKENDS, GpuOptions
from perception_rt.core.errors import (
    BackendError,
    PerceptionRtError,
    UnavailableError,
    UsageError,
)
from perception_rt.detector.backend import Backend
from perception_rt.detector.model import Model

AUTO, TENSORRT, ONNXRUNTIME, NONE = "auto", "tensorrt", "onnxruntime", "none"
GPU_BACKENDS = (TENSORRT, "onnxruntime-tensorrt", "onnxruntime-cuda")
AUTO_ORDER = (TENSORRT, "onnxruntime-cuda", ONNXRUNTIME)
"""What ``auto`` tries; ``onnxruntime-tensorrt`` is left out: it may build engines for minutes."""

_PROVIDERS = {
    ONNXRUNTIME: "CPUExecutionProvider",
    "onnxruntime-cuda": "CUDAExecutionProvider",
    "onnxruntime-tensorrt": "TensorrtExecutionProvider",
}

ThreadInit = Callable[[], None] | None

_MEMBERS = [name for name in vars(Backend) if not name.startswith("_")]


@dataclass(frozen=True)
class LoadOptions:
    """What every backend is loaded with.

    Attributes:
        model: what it runs.
        intra_op_threads: threads of one run on a CPU.
        gpu: options of a GPU.
        thread_init: called once on the running thread before anything else (priority, core).
        standby_init: the same for a fallback, which must never hold up the primary.
    """

    model: Model
    intra_op_threads: int = 1
    gpu: GpuOptions = field(default_factory=GpuOptions)
    thread_init: ThreadInit = None
    standby_init: ThreadInit = None


@dataclass(frozen=True)
class Candidate:
    """A backend that has loaded, under its name; not warmed up."""

    name: str
    backend: Backend


@dataclass(frozen=True)
class Candidates:
    """What could be loaded.

    Attributes:
        primaries: of these the fastest is to be used; in the order of preference, at least one.
        fallback: takes over while a primary fails; may be one of ``primaries``.
        refused: one line on each that could not be loaded.
    """

    primaries: list[Candidate]
    fallback: Candidate | None
    refused: list[str]

    def all(self) -> list[Candidate]:
        """Every loaded backend once."""
        fallback = self.fallback
        extra = [fallback] if fallback is not None and fallback not in self.primaries else []
        return [*self.primaries, *extra]


def load_backend(name: str, options: LoadOptions) -> Backend:
    """Import and construct one backend; it is ready to run, but not warmed up.

    Args:
        name: one of ``BACKENDS`` but ``auto``, or ``module:Class`` of a class that takes model,
            intra_op_threads and thread_init.
        options: of the loading.

    Raises:
        UsageError: ``name`` names no backend: nothing to import, not callable with the arguments
            above, fails when called, or gives what lacks members of ``Backend``; or an option
            does not fit it.
        UnavailableError: a library, provider, driver, GPU or engine that it needs is not there.
        ModelError: the backend cannot load the model.
    """
    if name == TENSORRT:
        return _load_tensorrt(options)
    if name in _PROVIDERS:
        return _load_onnxruntime(name, options)
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        known = ", ".join(one for one in BACKENDS if one != AUTO)
        raise UsageError(f"backend '{name}' is unknown: use one of {known}, or 'module:Class'")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module's own code fails in any way there is
        raise UsageError(f"backend '{name}' cannot be imported: {_line(error)}") from error
    if not callable(factory):
        raise UsageError(
            f"backend '{name}' is a {type(factory).__name__}, not a class: use 'module:Class'"
        )
    arguments = (options.model, options.intra_op_threads, options.thread_init)
    try:
        inspect.signature(factory).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"backend '{name}' does not take (model, intra_op_threads, thread_init): "
            f"{_line(error)}"
        ) from error
    try:
        backend: Backend = factory(*arguments)
    except PerceptionRtError:
        raise
    except Exception as error:
        raise UsageError(
            f"backend '{name}' cannot be constructed: {type(error).__name__}: {_line(error)}"
        ) from error
    present = dir(backend)  # asks no property for its value
    missing = [member for member in _MEMBERS if member not in present]
    if missing:
        raise UsageError(f"backend '{name}' is no backend: it lacks {', '.join(missing)}")
    return backend


def _load_onnxruntime(name: str, options: LoadOptions) -> Backend:
    try:
        from perception_rt.detector.onnx_backend import OnnxBackend
    except ImportError as error:
        raise UnavailableError(
            f"ONNX Runtime cannot be imported ({error}): install onnxruntime"
        ) from error
    return OnnxBackend(
        options.model,
        options.intra_op_threads,
        options.thread_init,
        provider=_PROVIDERS[name],
        gpu=options.gpu,
    )


def _load_tensorrt(options: LoadOptions) -> Backend:
    from perception_rt.detector.engine_set import cache_of, find_kernel, load_engines
    from perception_rt.detector.gpu_facts import probe_gpu
    from perception_rt.detector.tensorrt_backend import TensorRtBackend

    gpu = options.gpu
    try:
        engines = load_engines(options.model, gpu, gpu.build_on_configure)
        note = engines.note or engines.precision
        kernel = find_kernel(cache_of(gpu), probe_gpu())
        cubin = None if isinstance(kernel, str) else kernel.data
        if isinstance(kernel, str):
            note += f"; {kernel}"
        return TensorRtBackend(
            options.model, gpu, engines.plans, options.thread_init, cubin=cubin, note=note
        )
    except PerceptionRtError:
        raise
    except Exception as error:  # a binding of another version fails in any way there is
        raise BackendError(f"TensorRT: {type(error).__name__}: {_line(error)}") from error


def load_candidates(name: str, fallback: str, options: LoadOptions) -> Candidates:
    """Load what a configuration asks for.

    Args:
        name: as for ``load_backend``; of ``auto`` all that load.
        fallback: ``auto`` is ``onnxruntime`` behind a backend on a GPU and else none; ``none``;
            or a name as for ``load_backend``.
        options: of the loading.

    Raises:
        UsageError: a name of no backend, or a fallback that is the backend itself.
        PerceptionRtError: a backend that was asked for by its name, or the last one of ``auto``,
            does not load.
    """
    if fallback == AUTO:
        fallback = ONNXRUNTIME if name in (AUTO, *GPU_BACKENDS) else NONE
    elif fallback == name:
        raise UsageError(
            f"fallback_backend '{fallback}' is the backend itself: use 'none', or another"
        )
    standby = LoadOptions(
        options.model, options.intra_op_threads, options.gpu, options.standby_init
    )
    primaries: list[Candidate] = []
    refused: list[str] = []
    tried = AUTO_ORDER if name == AUTO else (name,)
    for one in tried:
        behind = one == fallback and bool(primaries)
        try:
            backend = load_backend(one, standby if behind else options)
        except PerceptionRtError as error:
            if name != AUTO or (one == AUTO_ORDER[-1] and not primaries):
                _close(primaries)
                raise
            refused.append(f"{one}: {error}")
        else:
            primaries.append(Candidate(one, backend))
    spare = next((c for c in primaries if c.name == fallback), None)
    if spare is None and fallback not in (NONE, *tried):
        try:
            spare = Candidate(fallback, load_backend(fallback, standby))
        except PerceptionRtError:
            _close(primaries)
            raise
    return Candidates(primaries, spare, refused)


def _close(candidates: Sequence[Candidate]) -> None:
    for candidate in candidates:
        candidate.backend.close()


def fastest(p99_ns: Mapping[str, int]) -> str:
    """The name with the least p99 of the first exit; the first of equals."""
    return min(p99_ns, key=lambda name: p99_ns[name])


def reason_of(
    name: str, asked: str, fallback: str, p99_ns: Mapping[str, int], refused: Sequence[str]
) -> str:
    """One line on why ``name`` runs.

    Args:
        name: what was chosen.
        asked: what was configured.
        fallback: its fallback, empty: none.
        p99_ns: of the first exit at warm-up, of everything measured.
        refused: one line on each that could not be used.
    """
    measured = ", ".join(f"{one} {ns / NS_PER_MS:.1f} ms" for one, ns in p99_ns.items())
    parts = [
        f"{name} ({'the fastest that runs here' if asked == AUTO else 'as configured'})",
        f"fallback {fallback or 'none'}",
        f"first exit p99 at warm-up: {measured}",
        *(f"not usable: {line}" for line in refused),
    ]
    return "; ".join(parts)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
