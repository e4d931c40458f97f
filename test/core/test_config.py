"""The worker's configuration travels as JSON and is checked before it is sent."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.config import (
    GpuOptions,
    RealtimeConfig,
    RosConfig,
    SourceConfig,
    WorkerConfig,
)
from perception_rt.core.errors import UsageError

SOURCE = SourceConfig("bag", "some/bag")


@given(
    st.builds(
        WorkerConfig,
        model_dir=st.text(max_size=20),
        source=st.builds(
            SourceConfig,
            kind=st.sampled_from(["bag", "video", "topic"]),
            uri=st.text(max_size=20),
            topic=st.text(max_size=20),
            compressed=st.booleans(),
            loop=st.booleans(),
            rate=st.floats(0.001, 1000),
        ),
        budget_ns=st.integers(1, 10**12),
        frame_skip=st.booleans(),
        warmup_runs=st.integers(50, 1000),
        fallback_backend=st.text(max_size=9),
        gpu=st.builds(
            GpuOptions,
            engine_cache_dir=st.text(max_size=9),
            precision=st.sampled_from(["auto", "fp32", "fp16", "int8"]),
            dla_core=st.integers(-1, 3),
            build_on_configure=st.booleans(),
        ),
        realtime=st.builds(
            RealtimeConfig, required=st.booleans(), inference_core=st.integers(-1, 64)
        ),
        ros=st.builds(
            RosConfig, node_name=st.text(max_size=9), detections_depth=st.integers(1, 9)
        ),
        node_session_id=st.integers(0, 2**64 - 1),
    )
)
def test_json_brings_back_the_same_configuration(config):
    text = config.to_json()
    json.loads(text)
    assert WorkerConfig.from_json(text) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_ns": 0}, "deadline_ms must be above 0, got 0"),
        ({"budget_ns": -1_500_000}, "got -1.5"),
        ({"source": SourceConfig("webcam", "0")}, "'webcam'.*bag, video, topic"),
        ({"source": SourceConfig("bag", "b", rate=0.0)}, "rate must be above 0"),
        ({"source": SourceConfig("bag", "b", rate=float("nan"))}, "rate must be above 0"),
        ({"warmup_runs": 49}, "at least 50.*got 49"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(changes, message):
    fields = {"model_dir": "m", "source": SOURCE, "budget_ns": 1, **changes}
    with pytest.raises(UsageError, match=message):
        WorkerConfig(**fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp8"}, "precision 'fp8' is unknown: use one of auto, fp32, fp16, int8"),
        ({"dla_core": -2}, "dla_core must be -1 .* got -2"),
    ],
)
def test_options_of_a_gpu_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        GpuOptions(**changes)
