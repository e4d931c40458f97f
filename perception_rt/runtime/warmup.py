"""Warm-up: every code path of a frame is run before the worker is ready, and its durations become
the priors.

It runs in the deadline thread, with that thread's rights and core, so that what it measures is
what frames will meet.
"""

from __future__ import annotations

import time

from perception_rt.capture.source import Source
from perception_rt.core.clock import NS_PER_S, Clock
from perception_rt.core.errors import BackendError
from perception_rt.core.frame import FrameBuffer, Stage
from perception_rt.core.latency_model import LatencyModel
from perception_rt.detector.backend import PREPROCESS, Backend
from perception_rt.detector.postprocess import Detections, Postprocessor
from perception_rt.runtime.publisher import Publisher
from perception_rt.runtime.shared_state import SharedState

_RUN_LIMIT_NS = 30 * NS_PER_S
_REST = 0.2
"""Pause after each run, as a share of it: the kernel throttles SCHED_FIFO above 0.95 of a
second.
"""
_FALLBACK_SIZE = (720, 1280)


def warm_up(
    source: Source,
    backend: Backend,
    postprocessor: Postprocessor,
    publisher: Publisher,
    model: LatencyModel,
    state: SharedState,
    max_det: int,
    runs: int,
    first_exit_runs: int,
    clock: Clock,
) -> int:
    """Run every stage ``runs`` times, the first exit at least ``first_exit_runs`` times, and give
    the latency model its priors.

    Where the source has no sample to decode (a topic), grey frames of 1280x720 are used and
    decoding counts as 0.

    Returns:
        p99 (upper order statistic) of the first exit's end-to-end nanoseconds over the runs:
        decode, preprocess, segment 0, postprocess and publish, each of the same run.

    Raises:
        BackendError: a stage fails or does not return within 30 s.
    """
    buffer = FrameBuffer()
    detections = Detections(max_det)
    samples: dict[int, list[int]] = {Stage.PREPROCESS: [], Stage.POSTPROCESS: []}
    samples.update({Stage.SEGMENT_0 + k: [] for k in range(backend.exit_count)})
    decode: list[int] = []
    state.warmup_total = total = max(runs, first_exit_runs)
    for done in range(total):
        run_start_ns = start_ns = clock.now()
        if source.sample(buffer):
            decode.append(clock.now() - start_ns)
        else:
            decode.append(0)
            buffer.reserve(*_FALLBACK_SIZE)[:] = 114
        backend.begin(buffer.image)
        _wait_ready(backend, PREPROCESS, clock)
        samples[Stage.PREPROCESS].append(_duration(backend, PREPROCESS))
        for k in range(backend.exit_count if done < runs else 1):
            backend.launch(k)
            _wait_ready(backend, k, clock)
            samples[Stage.SEGMENT_0 + k].append(_duration(backend, k))
            start_ns = clock.now()
            postprocessor.run(
                backend.detections(k),
                backend.letterbox,
                state.confidence_threshold,
                state.nms_threshold,
                max_det,
                detections,
            )
            if k == 0:
                samples[Stage.POSTPROCESS].append(clock.now() - start_ns)
        state.warmup_done = done + 1
        time.sleep((clock.now() - run_start_ns) * _REST / NS_PER_S)
    publish = publisher.warm_up(detections, total)
    for stage, values in samples.items():
        model.prior(stage, values)
    model.prior(Stage.PUBLISH, publish)
    first_exit = sorted(
        map(
            sum,
            zip(
                decode,
                samples[Stage.PREPROCESS],
                samples[Stage.SEGMENT_0],
                samples[Stage.POSTPROCESS],
                publish,
            ),
        )
    )
    return first_exit[min(-(-99 * (total + 1) // 100), total) - 1]


def _wait_ready(backend: Backend, k: int, clock: Clock) -> None:
    limit_ns = clock.now() + _RUN_LIMIT_NS
    while not backend.ready(k):
        if clock.now() >= limit_ns:
            name = "preprocess" if k == PREPROCESS else f"segment {k}"
            raise BackendError(
                f"warm-up: {name} did not return within 30 s: check the model and the backend"
            )
        backend.wait_until(limit_ns)


def _duration(backend: Backend, k: int) -> int:
    start_ns, end_ns = backend.span_ns(k)
    return end_ns - start_ns
