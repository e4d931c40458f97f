"""Between ROS messages and parameters and the plain data of core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perception_rt_msgs.msg import FrameTiming, SupervisionStatus, WorkerHeartbeat

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.config import (
    GpuOptions,
    RealtimeConfig,
    RosConfig,
    SourceConfig,
    WorkerConfig,
)
from perception_rt.core.frame import Outcome
from perception_rt.core.supervision import (
    FrameFacts,
    HeartbeatFacts,
    SupervisionConfig,
    SupervisionResult,
)


def budget_ns(deadline_ms: float) -> int:
    """Nanoseconds of the parameter ``deadline_ms``."""
    return round(deadline_ms * NS_PER_MS)


def worker_config(
    values: Mapping[str, Any],
    model_dir: str,
    image_topic: str,
    ros: RosConfig,
    node_session_id: int,
) -> WorkerConfig:
    """What the worker is told.

    Args:
        values: the parameters of ``ros.parameters.DETECTOR`` by name.
        model_dir: directory with manifest.json.
        image_topic: resolved name of the image topic, used where ``source`` is ``topic``.
        ros: names of the worker's publishers.
        node_session_id: of the node.

    Raises:
        UsageError: a value that cannot be used.
    """
    uri = values["source_uri"]
    if values["source"] == "topic":
        uri = image_topic
    return WorkerConfig(
        model_dir=model_dir,
        source=SourceConfig(
            kind=values["source"],
            uri=uri,
            topic=values["bag_topic"],
            compressed=values["compressed"],
            loop=values["loop"],
            rate=float(values["rate"]),
        ),
        source_log=values["source_log"],
        backend=values["backend"],
        fallback_backend=values["fallback_backend"],
        intra_op_threads=values["intra_op_threads"],
        warmup_runs=values["warmup_runs"],
        gpu=GpuOptions(
            engine_cache_dir=values["engine_cache_dir"],
            precision=values["precision"],
            dla_core=values["dla_core"],
            build_on_configure=values["build_on_configure"],
        ),
        realtime=RealtimeConfig(
            **{
                name.partition(".")[2]: value
                for name, value in values.items()
                if name.startswith("realtime.")
            }
        ),
        ros=ros,
        node_session_id=node_session_id,
        **runtime_settings(values),
    )


def runtime_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that take effect on the next frame, as WorkerConfig and
    WorkerProcess.set_runtime name them.

    Args:
        values: some parameters by name; others are passed over.
    """
    settings = {
        name: float(values[name])
        for name in ("confidence_threshold", "nms_threshold")
        if name in values
    }
    settings.update({name: values[name] for name in ("max_det", "frame_skip") if name in values})
    if "deadline_ms" in values:
        settings["budget_ns"] = budget_ns(values["deadline_ms"])
    return settings


def supervision_config(values: Mapping[str, Any]) -> SupervisionConfig:
    """The watchdog's limits.

    Args:
        values: the parameters of ``ros.parameters.WATCHDOG`` by name.

    Raises:
        UsageError: limits that contradict each other.
    """
    limits: dict[str, int] = {}
    for name, value in values.items():
        group, _, field = name.partition(".")
        if group == "supervision" and field.endswith("_ms"):
            limits[field[:-3] + "_ns"] = round(value * NS_PER_MS)
        elif group == "supervision" and field != "frame_skip":
            limits[field] = value
    return SupervisionConfig(**limits)


def heartbeat_facts(beat: WorkerHeartbeat) -> HeartbeatFacts:
    """What supervision uses of a heartbeat."""
    return HeartbeatFacts(
        session_id=beat.session_id,
        node_session_id=beat.node_session_id,
        activation_count=beat.activation_count,
        state=beat.state,
        sequence=beat.sequence,
        capture_count=beat.capture_count,
        deadline_count=beat.deadline_count,
        inference_count=beat.inference_count,
        source_state=beat.source_state,
        degraded=beat.degraded,
    )


def frame_facts(timing: FrameTiming, frame_skip: bool) -> FrameFacts:
    """What supervision uses of a FrameTiming.

    Args:
        timing: the message.
        frame_skip: replaced frames are skipped by wish; the message does not say.
    """
    return FrameFacts(
        session_id=timing.session_id,
        frame_id=timing.frame_id,
        epoch=timing.epoch,
        outcome=timing.outcome,
        exit_head=timing.exit_head,
        deadline_ns=timing.deadline_ns,
        left_ns=timing.left_ns,
        capture_stamp_ns=timing.capture_stamp_ns,
        frame_skip=frame_skip,
    )


def total_misses(beat: WorkerHeartbeat, frame_skip: bool) -> int:
    """Misses of the session so far, as a heartbeat counts them."""
    totals: list[int] = beat.outcome_totals.tolist()
    return sum(totals[Outcome.LATE :]) - (totals[Outcome.REPLACED] if frame_skip else 0)


def fill_status(
    status: SupervisionStatus, stamp_ns: int, sequence: int, result: SupervisionResult
) -> None:
    """Write a judgement into a message.

    Args:
        status: gets it; reused from cycle to cycle.
        stamp_ns: of the judgement, CLOCK_MONOTONIC.
        sequence: of the cycle.
        result: the judgement.
    """
    status.stamp_ns = stamp_ns
    status.sequence = sequence
    status.state = int(result.state)
    status.causes = int(result.causes)
    status.permit = result.permit
    status.window_misses = result.window_misses
    status.window_length = result.window_length
    status.consecutive_misses = result.consecutive_misses
    status.last_frame_id = result.last_frame_id
    status.worker_session_id = result.worker_session_id
    status.heartbeat_age_ns = result.heartbeat_age_ns
    status.last_met_age_ns = result.last_met_age_ns
    status.cycle_lateness_ns = result.cycle_lateness_ns
    status.skipped_cycles = result.skipped_cycles
    status.reason = result.reason[:200]
