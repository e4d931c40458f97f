"""Warm-up of every backend that loaded, and the choice of the one that frames go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perception_rt.core.errors import BackendError
from perception_rt.core.latency_model import LatencyModel
from perception_rt.detector.backend import Backend
from perception_rt.detector.select import (
    AUTO,
    GPU_BACKENDS,
    Candidates,
    LoadOptions,
    fastest,
    load_backend,
    reason_of,
)
from perception_rt.detector.switching_backend import SwitchingBackend

WarmUp = Callable[[Backend, LatencyModel], int]
"""Warms a backend up, gives the model its priors, returns the first exit's p99 in nanoseconds."""


@dataclass(frozen=True)
class Selected:
    """The backend that frames go to.

    Attributes:
        backend: a SwitchingBackend where there is a fallback.
        primary: the backend of ``model``: ``backend`` itself without a fallback.
        model: durations of the primary.
        fallback: fallback and its durations; None without.
        first_exit_p99_ns: of the primary.
        report: ``primary``, ``fallback`` (empty: none), ``reason`` and ``detail`` (what the
            primary says of itself, empty: nothing), for people.
        left_behind: a backend that was not chosen did not stop.
    """

    backend: Backend
    primary: Backend
    model: LatencyModel
    fallback: tuple[Backend, LatencyModel] | None
    first_exit_p99_ns: int
    report: dict[str, str]
    left_behind: bool


def select(asked: str, candidates: Candidates, options: LoadOptions, warm_up: WarmUp) -> Selected:
    """Warm up what loaded, keep the primary with the least p99 of the first exit and the fallback,
    close the rest.

    Args:
        asked: the configured name.
        candidates: what loaded.
        options: to load a primary on a GPU again after it died.
        warm_up: called once for each backend.

    Raises:
        BackendError: a backend that was asked for by its name, or the last one of ``auto``, fails
            in warm-up.
    """
    models: dict[str, LatencyModel] = {}
    p99_ns: dict[str, int] = {}
    refused = list(candidates.refused)
    loaded = {candidate.name: candidate.backend for candidate in candidates.all()}
    primaries = [candidate.name for candidate in candidates.primaries]
    for name, backend in loaded.items():
        model = LatencyModel(backend.exit_count)
        try:
            p99_ns[name] = warm_up(backend, model)
        except BackendError as error:
            if asked != AUTO or name not in primaries or len(primaries) == 1:
                raise
            primaries.remove(name)
            refused.append(f"{name}: {error}")
        else:
            models[name] = model
    primary = fastest({name: p99_ns[name] for name in primaries})
    spare = candidates.fallback
    fallback = spare.name if spare is not None and spare.name in models else ""
    if fallback == primary:
        fallback = ""
    left_behind = False
    for name, backend in loaded.items():
        if name not in (primary, fallback):
            left_behind |= not backend.close()
    describe = getattr(loaded[primary], "describe", None)
    report = {
        "primary": primary,
        "fallback": fallback,
        "reason": reason_of(primary, asked, fallback, p99_ns, refused),
        "detail": describe() if describe is not None else "",
    }
    backend = loaded[primary]
    if fallback:
        backend = SwitchingBackend(
            loaded[primary],
            loaded[fallback],
            (primary, fallback),
            reload=(lambda: load_backend(primary, options)) if primary in GPU_BACKENDS else None,
        )
    return Selected(
        backend=backend,
        primary=loaded[primary],
        model=models[primary],
        fallback=(loaded[fallback], models[fallback]) if fallback else None,
        first_exit_p99_ns=p99_ns[primary],
        report=report,
        left_behind=left_behind,
    )
