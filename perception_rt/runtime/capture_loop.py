"""The capture thread's loop: from the source into the newest-frame slot, and a log of what was
delivered.

Budget of its own Python per frame, beside the source's read: 0.2 ms. It never logs.
"""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path

import numpy as np

from perception_rt.capture.slot import NewestSlot
from perception_rt.capture.source import Source, SourceEvent
from perception_rt.core.clock import NS_PER_MS, Clock, read_clock_offset
from perception_rt.core.errors import UsageError
from perception_rt.core.frame import FrameBuffer, FrameRecord, Outcome, Stage
from perception_rt.runtime.shared_state import SharedState, SourceState, WorkerState

READ_SLICE_NS = 20 * NS_PER_MS
"""Longest wait inside one read, so that the thread's progress counter grows whatever the camera
does.
"""
_IDLE_S = 0.005
START_LEAD_NS = 50 * NS_PER_MS
"""From activation to the first frame of a recorded source."""

SOURCE_LOG_DTYPE = np.dtype(
    [
        ("frame_id", "<u8"),
        ("epoch", "<u4"),
        ("header_stamp_ns", "<i8"),
        ("capture_stamp_ns", "<i8"),
    ]
)


class SourceLog:
    """What the source delivered, kept in preallocated memory and written at the end: the
    accounting's first set.

    Args:
        path: JSON lines file.
        capacity: frames kept; more are counted in ``overflow``.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: Path, capacity: int = 200_000) -> None:
        self._path = path
        try:
            path.write_text("")
        except OSError as error:
            raise UsageError(
                f"source_log {path} cannot be written ({error.strerror}): choose another file"
            ) from error
        self._rows = np.zeros(capacity, SOURCE_LOG_DTYPE)
        self._count = 0
        self.overflow = 0

    def add(self, buffer: FrameBuffer) -> None:
        """Keep one delivered frame."""
        if self._count == len(self._rows):
            self.overflow += 1
            return
        self._rows[self._count] = (
            buffer.frame_id,
            buffer.epoch,
            buffer.header_stamp_ns,
            buffer.capture_stamp_ns,
        )
        self._count += 1

    def write(self) -> None:
        """Write one JSON object per frame, and one with ``overflow`` where frames did not fit."""
        names = SOURCE_LOG_DTYPE.names or ()
        with self._path.open("w") as file:
            for row in self._rows[: self._count].tolist():
                file.write(json.dumps(dict(zip(names, row))) + "\n")
            if self.overflow:
                file.write(json.dumps({"overflow": self.overflow}) + "\n")


class CaptureLoop:
    """Delivers frames while the worker is active.

    Args:
        source: open, not yet started.
        slot: newest frame.
        dropped: records of frames that end here (REPLACED, FAILED); the deadline thread reports
            them.
        state: shared with the parent process.
        exit_count: of the model, for records.
        log: what was delivered; None without.
        clock: CLOCK_MONOTONIC.

    Attributes:
        running: the source has been started and not yet been paused; the deadline thread waits
            for False before it goes inactive.
    """

    def __init__(
        self,
        source: Source,
        slot: NewestSlot,
        dropped: deque[FrameRecord],
        state: SharedState,
        exit_count: int,
        log: SourceLog | None,
        clock: Clock,
    ) -> None:
        self._source = source
        self._slot = slot
        self._dropped = dropped
        self._state = state
        self._exit_count = exit_count
        self._log = log
        self._now = clock.now
        self._frame_id = 0
        self._started_before = False
        self.running = False

    def run(self) -> None:
        """Deliver until ``stop`` is set in the shared state."""
        self._state.stamp_source = self._source.stamp_source
        try:
            self._serve()
        finally:
            self.running = False  # the deadline thread waits for it, whatever ended this one

    def _serve(self) -> None:
        state = self._state
        while not state.stop:
            state.capture_count += 1
            if not state.active:
                self.running = False
                time.sleep(_IDLE_S)
            elif self.running and state.source_state != SourceState.ENDED:
                self.step()
            elif not self.running and state.worker_state == WorkerState.ACTIVE:
                self._start()  # not before: an inactive worker is silent
            else:
                time.sleep(_IDLE_S)

    def _start(self) -> None:
        # A restart of a recorded source begins anew: its stamps jump back, which is an event.
        if self._started_before:
            self._state.epoch += 1
        self._started_before = True
        self._state.source_state = SourceState.OK
        self._source.start(self._now() + START_LEAD_NS)
        self.running = True

    def step(self) -> None:
        """One read of the source."""
        state = self._state
        buffer = self._slot.writable()
        event = self._source.read(buffer, self._now() + READ_SLICE_NS)
        if event == SourceEvent.FRAME:
            state.source_state = SourceState.OK
            self._deliver(buffer)
        elif event == SourceEvent.JUMP:
            state.epoch += 1
        elif event == SourceEvent.LOST:
            state.source_state = SourceState.LOST
        elif event == SourceEvent.ENDED:
            state.source_state = SourceState.ENDED

    def _deliver(self, buffer: FrameBuffer) -> None:
        self._frame_id += 1
        buffer.frame_id = self._frame_id
        buffer.epoch = self._state.epoch
        buffer.clock_offset_ns, buffer.clock_offset_error_ns = read_clock_offset(attempts=1)
        if self._log is not None:
            self._log.add(buffer)
        if buffer.error:
            self._drop(buffer, Outcome.FAILED)
        else:
            replaced = self._slot.put(buffer)
            if replaced is not None:
                self._drop(replaced, Outcome.REPLACED)
        # Counted last: who sees the count finds the frame in the slot or its record in the queue.
        self._state.delivered_frames = self._frame_id

    def _drop(self, buffer: FrameBuffer, outcome: Outcome) -> None:
        record = FrameRecord(self._exit_count)
        record.begin(buffer, self._state.budget_ns)
        record.outcome = outcome
        if outcome == Outcome.REPLACED:
            record.start_ns[Stage.QUEUE] = buffer.capture_end_ns
            record.end_ns[Stage.QUEUE] = self._now()
        self._dropped.append(record)
