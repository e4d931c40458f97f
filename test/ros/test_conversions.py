"""Parameters and messages into plain data and back."""

from __future__ import annotations

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")

from perception_rt_msgs.msg import FrameTiming, SupervisionStatus, WorkerHeartbeat

from perception_rt.core.config import (
    GpuOptions,
    RealtimeConfig,
    RosConfig,
    SourceConfig,
    WorkerConfig,
)
from perception_rt.core.errors import UsageError
from perception_rt.core.supervision import (
    Cause,
    FrameFacts,
    HeartbeatFacts,
    State,
    SupervisionConfig,
    SupervisionResult,
)
from perception_rt.ros.conversions import (
    fill_status,
    frame_facts,
    heartbeat_facts,
    runtime_settings,
    supervision_config,
    total_misses,
    worker_config,
)
from perception_rt.ros.parameters import DETECTOR, WATCHDOG

DEFAULTS = {name: spec.default for name, spec in DETECTOR.items()}
LIMITS = {name: spec.default for name, spec in WATCHDOG.items()}


def test_default_parameters_are_the_worker_s_defaults() -> None:
    ros = RosConfig(node_name="detector_worker")
    config = worker_config(DEFAULTS, "models/x", "/image", ros, 7)
    assert config == WorkerConfig(
        model_dir="models/x",
        source=SourceConfig("topic", "/image"),
        budget_ns=100_000_000,
        ros=ros,
        node_session_id=7,
    )


def test_every_parameter_arrives() -> None:
    values = {
        **DEFAULTS,
        "source": "bag",
        "source_uri": "b",
        "bag_topic": "/cam",
        "compressed": True,
        "loop": True,
        "rate": 2,
        "source_log": "log",
        "deadline_ms": 33.3,
        "confidence_threshold": 1,
        "nms_threshold": 0.25,
        "max_det": 9,
        "frame_skip": True,
        "backend": "a:B",
        "fallback_backend": "c:D",
        "engine_cache_dir": "engines",
        "precision": "fp16",
        "dla_core": 1,
        "build_on_configure": True,
        "intra_op_threads": 2,
        "warmup_runs": 51,
        "realtime.enabled": False,
        "realtime.required": True,
        "realtime.capture_core": 1,
        "realtime.inference_core": 2,
        "realtime.capture_priority": 3,
        "realtime.deadline_priority": 4,
        "realtime.inference_priority": 5,
    }
    config = worker_config(values, "m", "/image", RosConfig(), 1)
    assert config == WorkerConfig(
        model_dir="m",
        source=SourceConfig("bag", "b", "/cam", compressed=True, loop=True, rate=2.0),
        budget_ns=33_300_000,
        confidence_threshold=1.0,
        nms_threshold=0.25,
        max_det=9,
        frame_skip=True,
        warmup_runs=51,
        backend="a:B",
        fallback_backend="c:D",
        gpu=GpuOptions("engines", "fp16", 1, True),
        intra_op_threads=2,
        source_log="log",
        realtime=RealtimeConfig(False, True, 1, 2, 3, 4, 5),
        node_session_id=1,
    )
    assert WorkerConfig.from_json(config.to_json()) == config


def test_only_settings_of_the_next_frame_are_forwarded() -> None:
    assert runtime_settings({"deadline_ms": 20, "source_uri": "x", "max_det": 3}) == {
        "budget_ns": 20_000_000,
        "max_det": 3,
    }
    assert runtime_settings({"source_uri": "x"}) == {}


def test_default_limits_are_those_of_the_supervisor() -> None:
    assert supervision_config(LIMITS) == SupervisionConfig()


def test_limits_in_milliseconds_and_numbers() -> None:
    config = supervision_config(
        {**LIMITS, "supervision.grace_ms": 1.5, "supervision.window_expired": 7}
    )
    assert config == SupervisionConfig(grace_ns=1_500_000, window_expired=7)
    with pytest.raises(UsageError, match="window_failed <= window_expired"):
        supervision_config({**LIMITS, "supervision.window_failed": 9})


def test_facts_of_a_heartbeat() -> None:
    beat = WorkerHeartbeat(
        session_id=1,
        node_session_id=2,
        activation_count=3,
        state=2,
        sequence=4,
        capture_count=5,
        deadline_count=6,
        inference_count=7,
        source_state=1,
        degraded=True,
    )
    assert heartbeat_facts(beat) == HeartbeatFacts(1, 2, 3, 2, 4, 5, 6, 7, 1, True)


def test_facts_of_a_frame() -> None:
    timing = FrameTiming(
        session_id=1,
        frame_id=2,
        epoch=3,
        outcome=FrameTiming.OUTCOME_OVERRUN,
        exit_head=1,
        deadline_ns=5,
        left_ns=4,
        capture_stamp_ns=3,
    )
    assert frame_facts(timing, True) == FrameFacts(1, 2, 3, 2, 1, 5, 4, 3, True)


def test_misses_of_a_session() -> None:
    beat = WorkerHeartbeat(outcome_totals=[100, 200, 300, 1, 2, 4, 8])
    assert total_misses(beat, frame_skip=False) == 15
    assert total_misses(beat, frame_skip=True) == 11


def test_a_judgement_becomes_a_status() -> None:
    result = SupervisionResult(
        state=State.EXPIRED,
        causes=Cause.ALIVE | Cause.DATA,
        permit=False,
        window_misses=1,
        window_length=20,
        consecutive_misses=2,
        last_frame_id=3,
        worker_session_id=4,
        heartbeat_age_ns=5,
        last_met_age_ns=-1,
        cycle_lateness_ns=6,
        skipped_cycles=7,
        lost_frames=8,
        epoch_changes=9,
        reason="r" * 300,
    )
    status = SupervisionStatus()
    fill_status(status, 11, 12, result)
    assert status.stamp_ns == 11
    assert status.sequence == 12
    assert status.state == SupervisionStatus.STATE_EXPIRED
    assert status.causes == SupervisionStatus.CAUSE_ALIVE | SupervisionStatus.CAUSE_DATA
    assert status.permit is False
    for name in (
        "window_misses",
        "window_length",
        "consecutive_misses",
        "last_frame_id",
        "worker_session_id",
        "heartbeat_age_ns",
        "last_met_age_ns",
        "cycle_lateness_ns",
        "skipped_cycles",
    ):
        assert getattr(status, name) == getattr(result, name), name
    assert status.reason == "r" * 200
