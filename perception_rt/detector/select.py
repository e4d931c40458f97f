"""Choice of a backend by name; only the chosen one is imported."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from perception_rt.core.errors import PerceptionRtError, UnavailableError, UsageError
from perception_rt.detector.backend import Backend
from perception_rt.detector.model import Model

ONNXRUNTIME = "onnxruntime"

_MEMBERS = [name for name in vars(Backend) if not name.startswith("_")]


def load_backend(
    name: str,
    model: Model,
    intra_op_threads: int = 1,
    thread_init: Callable[[], None] | None = None,
) -> Backend:
    """Import and construct a backend; it is ready to run, but not warmed up.

    Args:
        name: ``onnxruntime``, or ``module:Class`` of a class that takes the arguments below.
        model: what it runs.
        intra_op_threads: threads of one run on CPU.
        thread_init: called once on the inference thread before anything else (priority, core).

    Raises:
        UsageError: ``name`` names no backend: nothing to import, not callable with the arguments
            above, fails when called, or gives what lacks members of ``Backend``.
        UnavailableError: ONNX Runtime is not installed.
        ModelError: the backend cannot load the model.
    """
    if name == ONNXRUNTIME:
        try:
            from perception_rt.detector.onnx_backend import OnnxBackend
        except ImportError as error:
            raise UnavailableError(
                f"ONNX Runtime cannot be imported ({error}): install onnxruntime"
            ) from error
        return OnnxBackend(model, intra_op_threads, thread_init)
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise UsageError(f"backend '{name}' is unknown: use '{ONNXRUNTIME}' or 'module:Class'")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module's own code fails in any way there is
        raise UsageError(f"backend '{name}' cannot be imported: {_line(error)}") from error
    if not callable(factory):
        raise UsageError(
            f"backend '{name}' is a {type(factory).__name__}, not a class: use 'module:Class'"
        )
    arguments = (model, intra_op_threads, thread_init)
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


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
