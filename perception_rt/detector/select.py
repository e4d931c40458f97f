"""Choice of a backend by name; only the chosen one is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from perception_rt.core.errors import UnavailableError, UsageError
from perception_rt.detector.backend import Backend
from perception_rt.detector.model import Model

ONNXRUNTIME = "onnxruntime"


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
        UsageError: ``name`` names no backend.
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
    except (ImportError, AttributeError) as error:
        raise UsageError(f"backend '{name}' cannot be imported: {error}") from error
    backend: Backend = factory(model, intra_op_threads, thread_init)
    return backend
