"""TensorRT on a GPU stream, one engine per segment.

One GPU thread owns the context and everything in it (``gpu_network``). It enqueues what the
deadline thread launches, at once and without waiting, and looks at the event of the oldest step in
flight every ``POLL_S`` until it is complete. The deadline thread never calls CUDA, and never waits
longer than it asks to, even if the device never answers. Between the two:

- ``_queue``: a deque whose append, popleft (GPU) and pop (deadline: taking back what has not been
  enqueued) are atomic, so that each step is taken by exactly one side. Its items are made once.
- a ``_Frame`` for each set of buffers: ``launched`` is written by the deadline thread, ``ended``
  by the GPU thread; in flight is their difference. Counting a step as ended is the last write of
  it, and what makes its result, or its fault, visible: all at once.
- two binary semaphores, each with one giver and one waiter: work came, a step ended.

A frame begins in the set whose former frame has wholly ended, so no result is ever taken for
another frame's. On a 2-core VM with a driver that does nothing, a segment costs the GPU thread
32 us (median; 13 us of it to enqueue), a poll 0.5 us.
"""

from __future__ import annotations

import atexit
import importlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.clock import NS_PER_S, Clock, MonotonicClock
from perception_rt.core.config import GpuOptions
from perception_rt.core.errors import BackendError, UnavailableError
from perception_rt.detector.backend import PREPROCESS
from perception_rt.detector.gpu_network import BufferSet, GpuNetwork
from perception_rt.detector.handover import IDLE_POLL_S, NO_FAULT, Signal, fault_text
from perception_rt.detector.model import Model
from perception_rt.detector.preprocess import Letterbox

POLL_S = 50e-6
"""Between two looks at an event in flight; the kernel adds about as much again."""

START_TIMEOUT_S = 120.0
"""How long ``thread_init`` and loading the engines may take."""

_NO_IMAGE: NDArray[np.uint8] = np.zeros((0, 0, 3), np.uint8)


class _Frame:
    """A frame in one set of buffers. Position 0 is preprocess, segment k is at k + 1."""

    def __init__(self, steps: int) -> None:
        self.buffers = BufferSet()
        self.image = _NO_IMAGE
        self.letterbox: Letterbox | None = None
        self.launched = 0
        self.ended = 0
        self.told = 0
        self.fault: BackendError | None = None
        self.fault_position = NO_FAULT
        self.on_device = [False] * steps
        self.start_ns = [0] * steps
        self.end_ns = [0] * steps

    def begin(self, image: NDArray[np.uint8]) -> None:
        """Forget the frame before. Nothing of it may be in flight."""
        self.image = image
        self.letterbox = None
        self.launched = self.ended = self.told = 0
        self.fault = None
        self.fault_position = NO_FAULT
        for i in range(len(self.start_ns)):
            self.start_ns[i] = 0
            self.end_ns[i] = 0

    def good(self) -> int:
        """How many steps have succeeded; raises the frame's fault, once."""
        ended = self.ended
        if ended <= self.fault_position:
            return ended
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        return self.fault_position


class TensorRtBackend:
    """Runs the segments of a model by TensorRT; see the protocol ``Backend``.

    Besides the protocol: ``dead``, ``describe``.

    Args:
        model: a checked model.
        options: which DLA core, if any.
        plans: a serialised engine for each segment, built for this GPU and TensorRT.
        thread_init: called once on the GPU thread before anything else (priority, core).
        trt, cuda: the modules ``tensorrt`` and ``pycuda.driver``; None: imported here.
        clock: CLOCK_MONOTONIC; spans are stamped with it.
        cubin: the compiled preprocess kernel (``engine_set.find_kernel``); None: preprocess runs
            on the CPU, on the GPU thread.
        note: what ``describe`` says besides.

    Raises:
        UnavailableError: no GPU, driver, ``tensorrt`` or ``pycuda``, or one that is too old.
        BackendError: an engine is refused or does not fit the model, a segment fails at its first
            run, the memory does not suffice, or loading takes longer than ``START_TIMEOUT_S``.
        BaseException: what ``thread_init`` raised.
    """

    def __init__(
        self,
        model: Model,
        options: GpuOptions,
        plans: list[bytes],
        thread_init: Callable[[], None] | None = None,
        trt: Any = None,
        cuda: Any = None,
        clock: Clock | None = None,
        cubin: bytes | None = None,
        note: str = "",
    ) -> None:
        self.model = model
        self._exits = len(model.segments)
        self._now = (clock or MonotonicClock()).now
        steps = self._exits + 1
        self._frames = (_Frame(steps), _Frame(steps))
        self._frame, self._other = self._frames
        self._items = {
            frame: [(frame, step) for step in range(PREPROCESS, self._exits)]
            for frame in self._frames
        }
        self._queue: deque[tuple[_Frame, int]] = deque()
        self._flight: deque[tuple[_Frame, int]] = deque()  # of the GPU thread alone
        self._progress = 0
        self._dead = False
        self._description = ""
        self._note = f"; {note}" if note else ""
        self._closing = False
        self._work = Signal()
        self._done = Signal()
        self._start_error: BaseException | None = None
        # In a list, so that the engines' bytes are let go once they are loaded.
        arguments = [
            trt or _module("tensorrt"),
            cuda or _module("pycuda.driver"),
            model,
            plans,
            cubin,
            options.dla_core,
        ]
        self._thread = threading.Thread(
            target=self._main, args=(thread_init, arguments), name="gpu", daemon=True
        )
        # A process that ends while a context is pushed is aborted by pycuda.
        atexit.register(self.close)
        self._thread.start()
        if not self._done.wait(START_TIMEOUT_S):
            self._closing = True
            raise BackendError(f"the engines were not loaded in {START_TIMEOUT_S:g} s")
        if self._start_error is not None:
            self.close()
            raise self._start_error

    # What follows is called from the deadline thread only.

    @property
    def exit_count(self) -> int:
        """Number of segments, and so of exit heads."""
        return self._exits

    @property
    def look_ahead(self) -> int:
        """1: the device would idle between two segments for a poll and a wake-up."""
        return 1

    @property
    def double_buffered(self) -> bool:
        """True: there are two sets of buffers."""
        return True

    @property
    def progress(self) -> int:
        """Grows whenever a step ends or the GPU thread idles (every ``IDLE_POLL_S``)."""
        return self._progress

    @property
    def dead(self) -> bool:
        """True after an error that the CUDA context keeps: close, then load anew."""
        return self._dead

    def describe(self) -> str:
        """One line: versions, device, memory, CUDA graphs and priority or why not, preprocess."""
        return self._description

    @property
    def letterbox(self) -> Letterbox:
        """How the present frame's pixels were mapped to the input tensor.

        Raises:
            BackendError: its preprocess has not finished.
        """
        frame = self._frame
        if frame.letterbox is None or not frame.ended:
            raise BackendError("the letterbox is not known yet: wait for ready(PREPROCESS)")
        return frame.letterbox

    def begin(self, image: NDArray[np.uint8]) -> None:
        """Start a frame in the other set of buffers and queue its preprocess.

        Raises:
            BackendError: the frame before the last one is still in flight, or the backend is
                closed or dead.
        """
        if self._closing:
            raise BackendError("the backend is closed: make a new one")
        if self._dead:
            raise BackendError("the GPU was lost: close the backend and make a new one")
        if self._other.launched != self._other.ended:
            raise BackendError("both sets of buffers are still in flight: drain first")
        self._frame, self._other = self._other, self._frame
        self._frame.begin(image)
        self._enqueue(PREPROCESS)

    def launch(self, k: int) -> None:
        """Queue segment ``k`` of the present frame.

        Raises:
            BackendError: out of order: the step before it was not launched, or ``k`` already was.
        """
        if not 0 <= k < self._exits or self._frame.launched != k + 1:
            raise BackendError(
                f"segment {k} launched out of order: begin a frame, then launch 0, 1, 2, ..."
            )
        self._enqueue(k)

    def ready(self, k: int) -> bool:
        """True when segment ``k`` (or PREPROCESS) of the present frame has finished; never blocks.

        Raises:
            BackendError: a step of this frame failed (raised once).
        """
        frame = self._frame
        if frame.good() <= k + 1:
            return False
        frame.told = max(frame.told, k + 2)
        return True

    def wait_until(self, t_ns: int) -> bool:
        """Sleep until something in flight finishes, of the frame before too, or until ``t_ns``.

        Raises:
            BackendError: a step of the present frame failed (raised once).
        """
        while True:
            self._frame.good()
            for frame in self._frames:
                ended = frame.ended
                if ended > frame.told:
                    frame.told = ended
                    return True
            if self._idle() or not self._sleep(t_ns):
                return False

    def drain(self, t_ns: int) -> bool:
        """Take back what is not enqueued, wait until ``t_ns`` for the rest of both frames; True:
        none is left.
        """
        queue = self._queue
        while queue:
            try:
                frame, step = queue.pop()
            except IndexError:  # the GPU thread was quicker
                break
            frame.start_ns[step + 1] = 0
            frame.launched -= 1
        while not self._idle():
            if not self._sleep(t_ns):
                return self._idle()
        return True

    def detections(self, k: int) -> NDArray[np.float32]:
        """The detection tensor of exit ``k``, float32 [A, 4 + C]; see ``Backend.detections``.

        A view that stays valid while the next frame runs.

        Raises:
            BackendError: exit ``k`` is not ready, or a step of this frame failed (raised once).
        """
        if not 0 <= k < self._frame.good() - 1:
            raise BackendError(f"exit {k} has no answer for this frame: ask ready({k}) first")
        return self._frame.buffers.views[k]

    def span_ns(self, k: int) -> tuple[int, int]:
        """Start and end of segment ``k`` or PREPROCESS in this frame; 0, 0 before its launch.

        The start is when it was enqueued, or when the step before it on the device ended, if that
        was later. The end is when the GPU thread saw it; 0 before.
        """
        return self._frame.start_ns[k + 1], self._frame.end_ns[k + 1]

    def previous_end_ns(self) -> int:
        """When the last launched step of the frame before ended; 0 while it is in flight."""
        frame = self._other
        launched = frame.launched
        return frame.end_ns[launched - 1] if 0 < launched == frame.ended else 0

    def close(self, timeout_s: float = 1.0) -> bool:
        """Stop the GPU thread; False when it did not return in time (it is left behind)."""
        self._closing = True
        self._queue.clear()
        self._work.give()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        atexit.unregister(self.close)
        return True

    def _enqueue(self, step: int) -> None:
        frame = self._frame
        frame.start_ns[step + 1] = self._now()
        frame.launched += 1
        self._queue.append(self._items[frame][step + 1])
        self._work.give()

    def _idle(self) -> bool:
        first, second = self._frames
        return first.launched == first.ended and second.launched == second.ended

    def _sleep(self, t_ns: int) -> bool:
        """Sleep until a step ends or ``t_ns``; False when ``t_ns`` was already reached."""
        left_ns = t_ns - self._now()
        if left_ns <= 0:
            return False
        self._done.wait(min(left_ns / NS_PER_S, 1.0))
        return True

    # What follows runs on the GPU thread.

    def _main(self, thread_init: Callable[[], None] | None, arguments: list[Any]) -> None:
        network = None
        try:
            if thread_init is not None:
                thread_init()
            network = GpuNetwork(*arguments)
            self._frames[0].buffers, self._frames[1].buffers = network.sets
            self._description = network.describe() + self._note
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            self._start_error = error.with_traceback(None)
        finally:
            arguments.clear()
            self._done.give()
        if network is None:
            return
        # NaN and infinity are found by the check of each output; a warning would be I/O.
        np.seterr(all="ignore")
        try:
            self._serve(network)
        finally:
            for frame in self._frames:
                frame.buffers = BufferSet()
            network.close()

    def _serve(self, network: GpuNetwork) -> None:
        queue, flight = self._queue, self._flight
        while not self._closing:
            try:
                frame, step = queue.popleft()
            except IndexError:
                if not flight:
                    self._work.wait(IDLE_POLL_S)
                    self._progress += 1
                elif not self._collect(network):
                    self._work.wait(POLL_S)
                continue
            self._begin_step(network, frame, step)
            if flight:
                self._collect(network)

    def _begin_step(self, network: GpuNetwork, frame: _Frame, step: int) -> None:
        """Enqueue a step, unless one before it in the same frame failed; never raises."""
        frame.on_device[step + 1] = False
        frame.start_ns[step + 1] = self._now()
        if self._dead:
            self._fail(frame, step, BackendError("the GPU was lost"))
        elif frame.fault_position == NO_FAULT:
            try:
                if step == PREPROCESS:
                    frame.letterbox = network.preprocess(frame.buffers, frame.image)
                    frame.image = _NO_IMAGE
                    frame.on_device[0] = network.preprocess_on_gpu
                else:
                    network.enqueue(frame.buffers, step)
                    frame.on_device[step + 1] = True
            except Exception as error:  # noqa: BLE001 (of any kind: this frame's fault)
                self._fail(frame, step, error)
                self._dead = not network.alive()
        if step == PREPROCESS and not frame.on_device[0]:
            self._end(frame, step)  # the first of its frame: it need not wait for another one's
        else:
            self._flight.append(self._items[frame][step + 1])

    def _collect(self, network: GpuNetwork) -> bool:
        """Count as ended what is complete, in order; True when something was."""
        flight = self._flight
        some = False
        while flight:
            frame, step = flight[0]
            if frame.on_device[step + 1] and not self._dead:
                try:
                    if not frame.buffers.events[step + 1].query():
                        break
                    if step != PREPROCESS and step + 1 < frame.fault_position:
                        network.check_finite(frame.buffers, step)
                except Exception as error:  # noqa: BLE001 (of any kind: this frame's fault)
                    self._fail(frame, step, error)
                    self._dead = not network.alive()
            elif self._dead:
                self._fail(frame, step, BackendError("the GPU was lost"))
            flight.popleft()
            self._end(frame, step)
            some = True
        return some

    def _fail(self, frame: _Frame, step: int, error: Exception) -> None:
        if step + 1 < frame.fault_position:
            # Text alone: a traceback would carry CUDA objects into another thread.
            frame.fault = BackendError(fault_text(step, error))
            frame.fault_position = step + 1

    def _end(self, frame: _Frame, step: int) -> None:
        now_ns = self._now()
        frame.end_ns[step + 1] = now_ns
        frame.ended += 1
        self._progress += 1
        if self._flight:
            following, k = self._flight[0]
            following.start_ns[k + 1] = max(following.start_ns[k + 1], now_ns)
        self._done.give()


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UnavailableError(
            f"{package} cannot be imported ({error}): install it as docs/jetson.md says, or use "
            "the onnxruntime backend"
        ) from None
