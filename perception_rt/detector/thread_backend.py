"""One own inference thread that runs preprocess and segments in the order of launching.

The deadline thread never waits for a step longer than it asks to, even if the step never returns.
Between the two threads there is no lock that is held while something runs:

- ``_queue``: a deque whose append, popleft (inference) and pop (deadline: taking back unstarted
  work) are atomic, so that each queued step is taken by exactly one side.
- ``_launched`` counts queued steps, ``_ended`` steps that ended, since the start; each has one
  writer. In flight is their difference. Counting itself as ended is the last write of a step, and
  what makes its result, or its fault, visible: all at once.
- two binary semaphores (``threading.Lock``: an acquire with a timeout sleeps in the kernel), each
  with one giver and one waiter: work came, a step ended.

A frame begins only when nothing is in flight, so no result is ever taken for another frame's.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.clock import NS_PER_S, Clock, MonotonicClock
from perception_rt.core.errors import BackendError
from perception_rt.core.frame import MAX_SEGMENTS
from perception_rt.detector.backend import PREPROCESS
from perception_rt.detector.handover import IDLE_POLL_S, NO_FAULT, Signal, fault_of
from perception_rt.detector.model import Model
from perception_rt.detector.preprocess import Letterbox, Preprocessor

START_TIMEOUT_S = 10.0
"""How long ``thread_init`` may take."""

_NO_IMAGE: NDArray[np.uint8] = np.zeros((0, 0, 3), np.uint8)


class ThreadBackend(ABC):
    """A ``Backend`` without a network: subclasses say what running a segment means.

    A subclass gets itself ready, then calls ``_start``. ``input`` and ``outputs[k]`` are the
    buffers that ``_run_segment`` reads and writes; they stay where they are.

    Args:
        model: gives the input, and the detection tensor of every exit.
        thread_init: called once on the inference thread before anything else (priority, core).
        clock: CLOCK_MONOTONIC; spans are stamped with it.
    """

    def __init__(
        self,
        model: Model,
        thread_init: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.model = model
        self.input: NDArray[np.float32] = np.zeros(model.input.tensor.shape, np.float32)
        self.outputs: list[NDArray[np.float32]] = [
            np.zeros(s.output.shape, np.float32) for s in model.segments
        ]
        self._views: list[NDArray[np.float32]] = [output[0] for output in self.outputs]
        self._finite = [np.zeros(output.shape, np.bool_) for output in self.outputs]
        self._preprocessor = Preprocessor(model)
        self._thread_init = thread_init
        self._now = (clock or MonotonicClock()).now

        self._queue: deque[int] = deque()
        self._image = _NO_IMAGE
        self._letterbox: Letterbox | None = None
        self._launched = 0
        self._ended = 0
        # of the present frame: _ended at its begin, _ended as far as the caller was told
        self._first = 0
        self._told = 0
        # a step's position in its frame is step + 1: preprocess 0, segment k at k + 1
        self._fault: BackendError | None = None
        self._fault_position = NO_FAULT
        self._start_ns = [0] * (MAX_SEGMENTS + 1)
        self._end_ns = [0] * (MAX_SEGMENTS + 1)
        self._progress = 0
        self._closing = False
        self._work = Signal()
        self._done = Signal()
        self._thread = threading.Thread(target=self._main, name="inference", daemon=True)
        self._start_error: BaseException | None = None

    @abstractmethod
    def _run_segment(self, k: int) -> None:
        """Run segment ``k``, on the inference thread: fill ``outputs[k]``."""

    def _start(self) -> None:
        """Start the inference thread and wait until ``thread_init`` has returned.

        Raises:
            BaseException: what ``thread_init`` raised.
            BackendError: it did not return in ``START_TIMEOUT_S``.
        """
        self._thread.start()
        if not self._done.wait(START_TIMEOUT_S):
            raise BackendError(
                f"the inference thread was not ready in {START_TIMEOUT_S:g} s: see thread_init"
            )
        if self._start_error is not None:
            raise self._start_error

    # What follows is called from the deadline thread only.

    @property
    def exit_count(self) -> int:
        """Number of segments, and so of exit heads."""
        return len(self.outputs)

    @property
    def look_ahead(self) -> int:
        """0: one thread loses nothing between two segments."""
        return 0

    @property
    def double_buffered(self) -> bool:
        """False: a frame begins when nothing is in flight."""
        return False

    def previous_end_ns(self) -> int:
        """0: nothing is ever queued behind an older frame."""
        return 0

    @property
    def progress(self) -> int:
        """Grows whenever the inference thread ends a step or idles (every ``IDLE_POLL_S``)."""
        return self._progress

    @property
    def letterbox(self) -> Letterbox:
        """How the present frame's pixels were mapped to the input tensor.

        Raises:
            BackendError: its preprocess has not finished.
        """
        if self._letterbox is None:
            raise BackendError("the letterbox is not known yet: wait for ready(PREPROCESS)")
        return self._letterbox

    def begin(self, image: NDArray[np.uint8]) -> None:
        """Start a frame and queue its preprocess; see ``Backend.begin``.

        Raises:
            BackendError: something is still in flight, or the backend is closed.
        """
        if self._launched != self._ended:
            raise BackendError("a step of the frame before is still in flight: drain first")
        if self._closing:
            raise BackendError("the backend is closed: make a new one")
        self._image = image
        self._letterbox = None
        self._fault = None
        self._fault_position = NO_FAULT
        for i in range(len(self._start_ns)):
            self._start_ns[i] = 0
            self._end_ns[i] = 0
        self._first = self._launched
        self._told = self._launched
        self._enqueue(PREPROCESS)

    def launch(self, k: int) -> None:
        """Queue segment ``k`` of the present frame.

        Raises:
            BackendError: out of order: the step before it was not launched, or ``k`` already was.
        """
        if not 0 <= k < len(self.outputs) or self._launched - self._first != k + 1:
            raise BackendError(
                f"segment {k} launched out of order: begin a frame, then launch 0, 1, 2, ..."
            )
        self._enqueue(k)

    def ready(self, k: int) -> bool:
        """True when segment ``k`` (or PREPROCESS) of the present frame has finished; never blocks.

        Raises:
            BackendError: a step of this frame failed (raised once).
        """
        if self._good() <= k + 1:
            return False
        self._told = max(self._told, self._first + k + 2)
        return True

    def wait_until(self, t_ns: int) -> bool:
        """Sleep until something in flight finishes or until ``t_ns``; see ``Backend.wait_until``.

        Raises:
            BackendError: a step of this frame failed (raised once).
        """
        while True:
            self._good()
            ended = self._ended
            if ended > self._told:
                self._told = ended
                return True
            if ended == self._launched:
                return False
            if not self._sleep(t_ns):
                return False

    def drain(self, t_ns: int) -> bool:
        """Take back what has not started, wait until ``t_ns`` for what has; True: none is left."""
        queue = self._queue
        while queue:
            try:
                queue.pop()
            except IndexError:  # the inference thread was quicker
                break
            self._launched -= 1
        while self._ended != self._launched:
            if not self._sleep(t_ns):
                return self._ended == self._launched
        return True

    def detections(self, k: int) -> NDArray[np.float32]:
        """The detection tensor of exit ``k``, float32 [A, 4 + C]; see ``Backend.detections``.

        Raises:
            BackendError: exit ``k`` is not ready, or a step of this frame failed (raised once).
        """
        if not 0 <= k < self._good() - 1:
            raise BackendError(f"exit {k} has no answer for this frame: ask ready({k}) first")
        return self._views[k]

    def span_ns(self, k: int) -> tuple[int, int]:
        """Start and end of segment ``k`` or PREPROCESS in this frame; 0, 0 before its end."""
        end_ns = self._end_ns[k + 1]
        return (self._start_ns[k + 1], end_ns) if end_ns else (0, 0)

    def close(self, timeout_s: float = 1.0) -> bool:
        """Stop the inference thread; False when it did not return in time (it is left behind)."""
        self._closing = True
        self._queue.clear()
        self._work.give()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _enqueue(self, step: int) -> None:
        self._launched += 1
        self._queue.append(step)
        self._work.give()

    def _sleep(self, t_ns: int) -> bool:
        """Sleep until a step ends or ``t_ns``; False when ``t_ns`` was already reached."""
        left_ns = t_ns - self._now()
        if left_ns <= 0:
            return False
        self._done.wait(min(left_ns / NS_PER_S, 1.0))
        return True

    def _good(self) -> int:
        """How many steps of the present frame have succeeded; raises its fault, once."""
        ended = self._ended - self._first
        if ended <= self._fault_position:
            return ended
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        return self._fault_position

    # What follows runs on the inference thread.

    def _main(self) -> None:
        try:
            if self._thread_init is not None:
                self._thread_init()
        except BaseException as error:  # noqa: BLE001 (raised by _start, in the caller's thread)
            self._start_error = error
            return
        finally:
            self._done.give()
        # NaN and infinity are found by the check of each output; a warning would be I/O.
        np.seterr(all="ignore")
        queue = self._queue
        while not self._closing:
            try:
                step = queue.popleft()
            except IndexError:
                self._work.wait(IDLE_POLL_S)
                self._progress += 1
                continue
            self._run(step)
            self._ended += 1
            self._progress += 1
            self._done.give()

    def _run(self, step: int) -> None:
        """Run one step, unless a step before it in the same frame failed; never raises."""
        if self._fault_position != NO_FAULT:
            return
        self._start_ns[step + 1] = self._now()
        try:
            if step == PREPROCESS:
                self._letterbox = self._preprocessor.run(self._image, self.input)
                self._image = _NO_IMAGE
            else:
                self._run_segment(step)
                self._check_finite(step)
        except Exception as error:  # noqa: BLE001 (of any kind: this frame's fault)
            self._fault = fault_of(step, error)
            self._fault_position = step + 1
        self._end_ns[step + 1] = self._now()

    def _check_finite(self, k: int) -> None:
        """Refuse NaN and infinity in exit ``k`` (46 us at 3549 x 84)."""
        finite = self._finite[k]
        np.isfinite(self.outputs[k], out=finite)
        if not finite.all():
            raise BackendError("NaN or infinity in the detection tensor")
