"""The types an engine really computes in, asked of the engine itself.

TensorRT may run a layer in another type than the network asked for (8.6 as it likes, any version
where it fuses): a report must not repeat the wish.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from perception_rt.detector.engine_builder import shared_log

_TYPES = (
    ("int8", r"int8"),
    ("fp8", r"fp8"),
    ("fp16", r"fp16|half"),
    ("bf16", r"bf16|bfloat16"),
    ("fp32", r"fp32|float"),
)


def engine_types(trt: Any, plan: bytes) -> dict[str, int]:
    """Layers of an engine by the type of their first output; empty where it cannot be loaded.

    Args:
        trt: the TensorRT module that built it.
        plan: the serialised engine, built with detailed profiling verbosity.
    """
    runtime = trt.Runtime(shared_log(trt).logger)
    engine = runtime.deserialize_cuda_engine(plan) if runtime is not None else None
    if engine is None:
        return {}
    inspector = engine.create_engine_inspector()
    return count_types(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def count_types(text: str) -> dict[str, int]:
    """Count the layers of an engine inspector's JSON text; formats without a known type count as
    ``other``.
    """
    try:
        layers = json.loads(text)["Layers"]
        outputs = [layer["Outputs"][0]["Format/Datatype"] for layer in layers if layer["Outputs"]]
    except (ValueError, KeyError, TypeError, IndexError):
        return {}
    return dict(sorted(Counter(_type_of(str(output)) for output in outputs).items()))


def _type_of(text: str) -> str:
    for name, pattern in _TYPES:
        if re.search(pattern, text, re.IGNORECASE):
            return name
    return "other"
