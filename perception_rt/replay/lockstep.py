"""Lock-step replay: every frame of a recording once, as fast as it goes, always the same exit, no
deadline.

For the logic, never for latency: the same recording and model give the same detections, whatever
    the machine does.
"""

from __future__ import annotations

import hashlib
import statistics
import struct
import time
from collections.abc import Callable
from typing import Any

from perception_rt.core.clock import NS_PER_S
from perception_rt.core.config import WorkerConfig
from perception_rt.core.errors import BackendError, InputError, UsageError
from perception_rt.core.frame import Stage, stage_name
from perception_rt.detector.backend import PREPROCESS, Backend
from perception_rt.detector.model import load_model
from perception_rt.detector.postprocess import Detections, Postprocessor
from perception_rt.detector.select import AUTO, ONNXRUNTIME, LoadOptions, load_backend
from perception_rt.replay.bag_frames import bag_frames
from perception_rt.replay.runner import Progress, count_frames

SEGMENT_TIMEOUT_NS = 60 * NS_PER_S


def lockstep(config: WorkerConfig, exit_head: int | None, progress: Progress) -> dict[str, Any]:
    """Run every frame of ``config.source`` to one exit.

    Args:
        config: model, source, backend and thresholds; its budget is not used.
        exit_head: index of the exit; None: the deepest.

    Returns:
        JSON-ready, see docs/json_commands.md; ``digest`` is that of all detections in order.

    Raises:
        UsageError: the model has no such exit.
        InputError: nothing in the recording could be decoded.
        PerceptionRtError: recording, model or backend cannot be used.
    """
    frame_count = count_frames(config.source)
    model = load_model(config.model_dir)
    # What this says must not depend on the machine's speed.
    name = ONNXRUNTIME if config.backend == AUTO else config.backend
    backend = load_backend(name, LoadOptions(model, config.intra_op_threads, config.gpu))
    try:
        exit_head = backend.exit_count - 1 if exit_head is None else exit_head
        if not 0 <= exit_head < backend.exit_count:
            raise UsageError(
                f"--exit {exit_head}: the model has the exits 0 to {backend.exit_count - 1}"
            )
        return _run(
            config,
            backend,
            Postprocessor(model, config.max_det),
            exit_head,
            lambda n: progress("lock-step", n, frame_count),
        )
    finally:
        backend.close()


def _run(
    config: WorkerConfig,
    backend: Backend,
    postprocessor: Postprocessor,
    exit_head: int,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    out = Detections(config.max_det)
    digest = hashlib.sha256()
    segments = range(Stage.SEGMENT_0, Stage.SEGMENT_0 + exit_head + 1)
    stages: dict[int, list[int]] = {
        stage: [] for stage in (Stage.PREPROCESS, *segments, Stage.POSTPROCESS)
    }
    frames: list[dict[str, Any]] = []
    begin_ns = time.monotonic_ns()
    for buffer in bag_frames(config.source):
        frame: dict[str, Any] = {
            "frame_id": buffer.frame_id,
            "header_stamp_ns": buffer.header_stamp_ns,
            "detections": 0,
            "error": buffer.error,
        }
        frames.append(frame)
        progress(buffer.frame_id)
        if buffer.error:
            continue
        try:
            _infer(backend, buffer.image, exit_head)
            start_ns = time.monotonic_ns()
            count = postprocessor.run(
                backend.detections(exit_head),
                backend.letterbox,
                config.confidence_threshold,
                config.nms_threshold,
                config.max_det,
                out,
            )
            stages[Stage.POSTPROCESS].append(time.monotonic_ns() - start_ns)
        except BackendError as error:
            frame["error"] = str(error)
            continue
        for k in range(PREPROCESS, exit_head + 1):
            start_ns, end_ns = backend.span_ns(k)
            stages[Stage.PREPROCESS if k == PREPROCESS else Stage.SEGMENT_0 + k].append(
                end_ns - start_ns
            )
        frame["detections"] = count
        digest.update(struct.pack("<QqI", buffer.frame_id, buffer.header_stamp_ns, count))
        for array in (out.boxes, out.scores, out.class_ids):
            digest.update(array[:count].tobytes())
    failed = [frame for frame in frames if frame["error"]]
    if frames and len(failed) == len(frames):
        raise InputError(
            f"{config.source.uri}: none of {len(frames)} frames could be used:"
            f" {failed[0]['error']}"
        )
    return {
        "command": "replay",
        "mode": "lockstep",
        "source": config.source.uri,
        "model": config.model_dir,
        "exit_head": exit_head,
        "exit_count": backend.exit_count,
        "elapsed_s": (time.monotonic_ns() - begin_ns) / NS_PER_S,
        "frame_count": len(frames),
        "failed_count": len(failed),
        "detection_count": sum(frame["detections"] for frame in frames),
        "digest": digest.hexdigest(),
        "stages": {stage_name(stage): _times(values) for stage, values in stages.items()},
        "frames": frames,
    }


def _infer(backend: Backend, image: Any, exit_head: int) -> None:
    backend.begin(image)
    for k in range(exit_head + 1):
        backend.launch(k)
    end_ns = time.monotonic_ns() + SEGMENT_TIMEOUT_NS
    while not backend.ready(exit_head):
        if not backend.wait_until(end_ns) and time.monotonic_ns() >= end_ns:
            raise BackendError(
                f"exit {exit_head} was not ready after {SEGMENT_TIMEOUT_NS // NS_PER_S} s"
            )


def _times(values: list[int]) -> dict[str, int]:
    return {"n": len(values), "p50_ns": round(statistics.median(values)), "max_ns": max(values)}
