"""What a worker process is told at its start. Plain data that travels as JSON; validated before
it is sent.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.errors import UsageError

SOURCE_KINDS = ("bag", "video", "topic")
BACKENDS = ("auto", "tensorrt", "onnxruntime-tensorrt", "onnxruntime-cuda", "onnxruntime")
"""Backends by name; ``module:Class`` names any other."""
FALLBACKS = ("auto", "none", "onnxruntime")
PRECISIONS = ("auto", "fp32", "fp16", "int8")
MIN_WARMUP_RUNS = 50


@dataclass(frozen=True)
class SourceConfig:
    """Where frames come from.

    Attributes:
        kind: ``bag``, ``video`` or ``topic``.
        uri: path of the bag or video, or the resolved name of the topic.
        topic: image topic inside a bag; empty: the only one there.
        compressed: for ``topic``: sensor_msgs/CompressedImage instead of Image.
        loop: start again at the end (bag and video).
        rate: speed of play, 1.0 is as recorded.
    """

    kind: str
    uri: str
    topic: str = ""
    compressed: bool = False
    loop: bool = False
    rate: float = 1.0


@dataclass(frozen=True)
class RealtimeConfig:
    """Real-time rights to ask for.

    Attributes:
        enabled: ask for SCHED_FIFO, affinity and mlockall at all.
        required: refuse to start without them, instead of a warning.
        capture_core: core of the capture and deadline threads; -1: chosen (isolated core, else
            the last).
        inference_core: core of the inference thread; -1: chosen (another than ``capture_core``).
        capture_priority, deadline_priority, inference_priority: SCHED_FIFO priorities, 1 to 98.
    """

    enabled: bool = True
    required: bool = False
    capture_core: int = -1
    inference_core: int = -1
    capture_priority: int = 80
    deadline_priority: int = 75
    inference_priority: int = 70


@dataclass(frozen=True)
class GpuOptions:
    """What the backends on a GPU are asked for; without effect on a CPU.

    Attributes:
        engine_cache_dir: where built engines are kept; empty: the user's cache directory.
        precision: of the engines: ``auto`` (the fastest within the stated loss), ``fp32``,
            ``fp16``, ``int8``.
        dla_core: run on this deep learning accelerator; -1: on the GPU.
        build_on_configure: build missing engines at configure, which takes minutes; else they are
            built by ``perception_rt model build`` alone.
    """

    engine_cache_dir: str = ""
    precision: str = "auto"
    dla_core: int = -1
    build_on_configure: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"precision '{self.precision}' is unknown: use one of {', '.join(PRECISIONS)}"
            )
        if self.dla_core < -1:
            raise UsageError(
                f"dla_core must be -1 (the GPU) or the number of a core, got {self.dla_core}"
            )


@dataclass(frozen=True)
class RosConfig:
    """Names that the worker's publishers use, resolved by the parent node, and the QoS of
    detections.

    Attributes:
        node_name, namespace: of the worker's own node.
        detections_topic, timing_topic, heartbeat_topic: fully qualified names.
        detections_reliable: reliable instead of best effort.
        detections_depth: KEEP_LAST depth.
    """

    node_name: str = ""
    namespace: str = "/"
    detections_topic: str = ""
    timing_topic: str = ""
    heartbeat_topic: str = ""
    detections_reliable: bool = True
    detections_depth: int = 1


@dataclass(frozen=True)
class WorkerConfig:
    """Everything a worker process needs.

    Attributes:
        model_dir: directory with manifest.json.
        source: where frames come from.
        budget_ns: allotted nanoseconds from capture stamp to deadline.
        confidence_threshold, nms_threshold: of the shared decode.
        max_det: most detections in one message.
        frame_skip: REPLACED is then by wish, not a miss.
        warmup_runs: runs of every segment before ready, at least 50.
        first_exit_runs: runs of the first exit, where its p99 is wanted from more runs than
            ``warmup_runs``.
        backend: one of ``BACKENDS``; ``module:Class`` loads another class with the signature of
            ``OnnxBackend``.
        fallback_backend: takes over while ``backend`` fails: ``auto`` (``onnxruntime`` behind a
            GPU), ``none``, ``onnxruntime`` or ``module:Class``.
        intra_op_threads: threads of the network on CPU.
        state_fd: file descriptor of the shared state.
        record_fd: file descriptor of a record ring, -1 without.
        source_log: file that gets one line per delivered frame when the worker stops; empty
            without.
        gpu: options of the backends on a GPU.
        realtime: rights to ask for.
        ros: names of the publishers.
        node_session_id: of the parent.
    """

    model_dir: str
    source: SourceConfig
    budget_ns: int
    confidence_threshold: float = 0.35
    nms_threshold: float = 0.6
    max_det: int = 100
    frame_skip: bool = False
    warmup_runs: int = 60
    first_exit_runs: int = 0
    backend: str = "auto"
    fallback_backend: str = "auto"
    intra_op_threads: int = 1
    state_fd: int = -1
    record_fd: int = -1
    source_log: str = ""
    gpu: GpuOptions = field(default_factory=GpuOptions)
    realtime: RealtimeConfig = field(default_factory=RealtimeConfig)
    ros: RosConfig = field(default_factory=RosConfig)
    node_session_id: int = 0

    def __post_init__(self) -> None:
        if self.budget_ns <= 0:
            raise UsageError(
                f"deadline_ms must be above 0, got {self.budget_ns / NS_PER_MS:g}: "
                "give the milliseconds a frame may take"
            )
        if self.source.kind not in SOURCE_KINDS:
            raise UsageError(
                f"source kind '{self.source.kind}' is unknown: "
                f"use one of {', '.join(SOURCE_KINDS)}"
            )
        if not self.source.rate > 0:
            raise UsageError(f"rate must be above 0, got {self.source.rate:g}")
        if self.warmup_runs < MIN_WARMUP_RUNS:
            raise UsageError(
                f"warmup_runs must be at least {MIN_WARMUP_RUNS} for a quantile to start from, "
                f"got {self.warmup_runs}"
            )

    def to_json(self) -> str:
        """The configuration as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerConfig:
        """Rebuild a configuration from ``to_json``.

        Raises:
            UsageError: a value that cannot be used.
        """
        data: dict[str, Any] = json.loads(text)
        data["source"] = SourceConfig(**data["source"])
        data["gpu"] = GpuOptions(**data["gpu"])
        data["realtime"] = RealtimeConfig(**data["realtime"])
        data["ros"] = RosConfig(**data["ros"])
        return cls(**data)
