"""The worker process: capture, deadline and inference threads, and nothing else that runs Python.

Run as ``python -m perception_rt.runtime.worker`` with a WorkerConfig as JSON on standard input it
publishes to nobody (replay); ``perception_rt.ros.worker_main`` runs the same with ROS publishers.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from perception_rt.capture.factory import make_source
from perception_rt.capture.slot import NewestSlot
from perception_rt.capture.source import Source
from perception_rt.core.clock import NS_PER_MS, MonotonicClock
from perception_rt.core.config import WorkerConfig
from perception_rt.core.errors import PerceptionRtError, UsageError
from perception_rt.core.exit_policy import ExitPolicy
from perception_rt.core.frame import FrameRecord
from perception_rt.core.latency_model import LatencyModel
from perception_rt.detector.backend import Backend
from perception_rt.detector.model import Model, load_model
from perception_rt.detector.postprocess import Postprocessor
from perception_rt.detector.select import LoadOptions, load_candidates
from perception_rt.latency.recorder import Recorder
from perception_rt.runtime.capture_loop import CaptureLoop, SourceLog
from perception_rt.runtime.pipeline import DeadlineLoop
from perception_rt.runtime.publisher import Heartbeat, NullPublisher, Publisher
from perception_rt.runtime.realtime import RealtimeSetup, die_with_parent
from perception_rt.runtime.selection import Selected, select
from perception_rt.runtime.shared_state import SharedState, WorkerState
from perception_rt.runtime.warmup import warm_up

SLOT_BUFFERS = 5
"""One written, one newest, one being processed, and two that overrunning first segments may still
read (two where a backend is double-buffered).
"""
WAKE_MARGIN_NS = NS_PER_MS // 2
"""Measured p99 of a FIFO wake-up is 0.35 ms."""
WAKE_MARGIN_WITHOUT_FIFO_NS = 5 * NS_PER_MS
"""Measured p99 of a SCHED_OTHER wake-up beside a full load is 4.8 ms."""
CLOSE_TIMEOUT_S = 1.0

PublisherFactory = Callable[[WorkerConfig, Model], Publisher]
SourceFactory = Callable[[WorkerConfig], Source]


class Worker:
    """One worker's parts and threads.

    Args:
        config: what the parent asked for.
        state: shared with the parent.
        make_publisher: called once, after the model is loaded.
        make_source: called once.

    Raises:
        PerceptionRtError: a part cannot be made; the message says which and what to do.
    """

    def __init__(
        self,
        config: WorkerConfig,
        state: SharedState,
        make_publisher: PublisherFactory,
        make_source: SourceFactory,
    ) -> None:
        self.config = config
        self.state = state
        self.clock = MonotonicClock()
        self.realtime = RealtimeSetup(config.realtime)
        self.error: PerceptionRtError | None = None
        self.unexpected: BaseException | None = None
        self.backend_hung = False

        self.source = make_source(config)
        self.source.open()
        model = load_model(Path(config.model_dir))
        self._load_options = LoadOptions(
            model,
            config.intra_op_threads,
            config.gpu,
            thread_init=self._init_inference_thread,
            standby_init=self._init_fallback_thread,
        )
        self._candidates = load_candidates(
            config.backend, config.fallback_backend, self._load_options
        )
        self._selected: Selected | None = None
        exit_count = self._candidates.primaries[0].backend.exit_count
        self.postprocessor = Postprocessor(model, config.max_det)
        self.publisher = make_publisher(config, model)
        state.exit_count = exit_count
        state.session_id = secrets.randbits(62) | 1
        self._slot = NewestSlot(SLOT_BUFFERS)
        self._dropped: deque[FrameRecord] = deque()
        self._log = SourceLog(Path(config.source_log)) if config.source_log else None
        self._recorder = Recorder.attach(config.record_fd) if config.record_fd >= 0 else None
        self._capture = CaptureLoop(
            self.source,
            self._slot,
            self._dropped,
            state,
            exit_count,
            self._log,
            self.clock,
        )
        self._capture_has_rights = threading.Event()
        self._ready = threading.Event()

    def _init_inference_thread(self) -> None:
        self.realtime.apply_to_thread(
            "inference", self.config.realtime.inference_priority, self.realtime.inference_core
        )

    def _init_fallback_thread(self) -> None:
        """Below the primary's, on the same core: a rehearsal of the fallback holds nobody up."""
        self.realtime.apply_to_thread(
            "fallback",
            max(self.config.realtime.inference_priority - 1, 1),
            self.realtime.inference_core,
        )

    def run(self) -> None:
        """Warm up, become ready, serve until told to stop; errors of the threads are kept in
        ``error``.
        """
        self._deadline_thread = threading.Thread(
            target=self._guarded, args=(self._run_deadline,), name="deadline"
        )
        self._capture_thread = threading.Thread(
            target=self._guarded, args=(self._run_capture,), name="capture"
        )
        self._deadline_thread.start()
        self._capture_thread.start()
        self._deadline_thread.join()
        self._capture_thread.join()
        self.backend_hung = not self._close_backends()
        self.source.close()
        if self._log is not None:
            self._log.write()

    def _close_backends(self) -> bool:
        selected = self._selected
        if selected is not None:
            return selected.backend.close(CLOSE_TIMEOUT_S) and not selected.left_behind
        closed = [one.backend.close(CLOSE_TIMEOUT_S) for one in self._candidates.all()]
        return all(closed)

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except PerceptionRtError as error:
            self.error = self.error or error
        except BaseException as error:  # noqa: BLE001  kept, and reported by the main thread
            self.unexpected = self.unexpected or error
        finally:
            # One thread's end is the worker's end: the parent restarts a whole one.
            self.state.stop = 1
            self._capture_has_rights.set()
            self._ready.set()

    def _run_capture(self) -> None:
        config = self.config.realtime
        self.realtime.apply_to_thread(
            "capture", config.capture_priority, self.realtime.capture_core
        )
        self._capture_has_rights.set()
        self._ready.wait()
        self._capture.run()

    def _run_deadline(self) -> None:
        config, state = self.config, self.state
        realtime = config.realtime
        rights = self.realtime.apply_to_thread(
            "deadline", realtime.deadline_priority, self.realtime.capture_core
        )
        selected = self._selected = select(
            config.backend, self._candidates, self._load_options, self._warm_up
        )
        state.first_exit_p99_ns = selected.first_exit_p99_ns
        state.backend = json.dumps(selected.report)
        self._capture_has_rights.wait()
        self.realtime.lock_memory()
        self.realtime.freeze_gc()
        state.report = json.dumps(asdict(self.realtime.report))
        self.realtime.check()
        margin_ns = (
            WAKE_MARGIN_NS if rights.policy == "SCHED_FIFO" else WAKE_MARGIN_WITHOUT_FIFO_NS
        )
        fallback = None
        if selected.fallback is not None:
            spare, model = selected.fallback
            fallback = (model, _policy(spare, model, margin_ns))
        loop = DeadlineLoop(
            selected.backend,
            self._slot,
            self._dropped,
            selected.model,
            _policy(selected.primary, selected.model, margin_ns),
            self.postprocessor,
            self.publisher,
            state,
            Heartbeat(state.session_id, config.node_session_id),
            config.max_det,
            self._recorder,
            self.clock,
            fallback,
        )
        self._ready.set()
        loop.announce(WorkerState.INACTIVE)
        serve(loop, self._capture, state)
        loop.announce(WorkerState.STOPPING)

    def _warm_up(self, backend: Backend, model: LatencyModel) -> int:
        config = self.config
        return warm_up(
            self.source,
            backend,
            self.postprocessor,
            self.publisher,
            model,
            self.state,
            config.max_det,
            config.warmup_runs,
            config.first_exit_runs,
            self.clock,
        )


def _policy(backend: Backend, model: LatencyModel, margin_ns: int) -> ExitPolicy:
    return ExitPolicy(
        backend.exit_count, model, wake_margin_ns=margin_ns, look_ahead=backend.look_ahead
    )


def serve(loop: DeadlineLoop, capture: CaptureLoop, state: SharedState) -> None:
    """Run the deadline loop until ``stop``; follow ``active`` of the shared state.

    Going inactive waits until capture has paused and every delivered frame has its outcome.
    """
    while True:
        if state.worker_state == WorkerState.ACTIVE:
            busy = loop.step()
            if not (state.active and not state.stop) and not busy and not capture.running:
                loop.report_dropped()
                if state.delivered_frames == sum(state.outcome_totals):
                    loop.announce(WorkerState.INACTIVE)
        elif state.stop:
            return
        elif state.active:
            loop.announce(WorkerState.ACTIVE)
        else:
            loop.step()


def run_worker(
    config: WorkerConfig,
    make_publisher: PublisherFactory,
    make_source: SourceFactory,
) -> int:
    """Run one worker to its end.

    Returns:
        Exit status: 0, or the error's; its words are in the shared state.
    """
    state = SharedState(config.state_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its worker itself
    signal.signal(signal.SIGTERM, lambda *_: setattr(state, "stop", 1))
    error: BaseException | None = None
    hung = False
    try:
        worker = Worker(config, state, make_publisher, make_source)
        worker.run()
        error = worker.error or worker.unexpected
        hung = worker.backend_hung
    except Exception as refused:  # noqa: BLE001  reported below, whatever it is
        error = refused
    code = report_end(state, error)
    if hung:
        # A thread that never returns would keep the interpreter alive for ever.
        sys.stderr.flush()
        os._exit(code)
    return code


def report_end(state: SharedState, error: BaseException | None) -> int:
    """Tell the parent why this worker ended; it has the last word to the user."""
    if error is None:
        return 0
    if isinstance(error, PerceptionRtError):
        state.message, state.error_code = str(error), error.exit_code
    else:
        state.message, state.error_code = f"{type(error).__name__}: {error}", 70
        traceback.print_exception(error)  # a defect of ours: its place is worth the lines
    state.worker_state = WorkerState.FAILED
    return state.error_code


def read_config() -> WorkerConfig:
    """The configuration that the parent wrote to standard input; also ties this process to the
    parent's life.

    Raises:
        UsageError: nothing there, or not started by WorkerProcess.
    """
    text = sys.stdin.read()
    parent = os.environ.get("PERCEPTION_RT_PARENT_PID", "")
    if not text or not parent:
        raise UsageError("a worker is started by detector_node or replay, not by hand")
    die_with_parent(int(parent))
    return WorkerConfig.from_json(text)


def main() -> int:
    """Entry of a worker that publishes to nobody."""
    try:
        config = read_config()
    except PerceptionRtError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return run_worker(
        config, lambda _config, _model: NullPublisher(), lambda c: make_source(c.source)
    )


if __name__ == "__main__":
    sys.exit(main())
