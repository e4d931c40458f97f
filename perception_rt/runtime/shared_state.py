"""State that a worker process and its parent share: one memfd, 8-byte fields, a single writer
each.

An aligned 8-byte store is seen whole by the other process on x86-64 and aarch64, so no lock is
needed. A group of settings is guarded by ``command_seq``: odd while the parent writes, even when
they belong together. A memfd has no name: nothing is left behind when both processes are killed.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from typing import Any

from perception_rt.core.frame import Outcome

_WORDS = 128
_TEXT_BYTES = 8192
_SIZE = _WORDS * 8 + 5 * _TEXT_BYTES


class WorkerState(IntEnum):
    """State of a worker. Values up to STOPPING are those of WorkerHeartbeat.msg."""

    STARTING = 0
    INACTIVE = 1
    ACTIVE = 2
    STOPPING = 3
    FAILED = 4
    """Ended by an error; ``SharedState.message`` has its words. Never sent as a heartbeat."""


class SourceState(IntEnum):
    """State of the frame source. Values are those of WorkerHeartbeat.msg."""

    OK = 0
    LOST = 1
    ENDED = 2


class _Int:
    """An int64 word of the shared block."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, owner: SharedState, kind: Any = None) -> int:
        return owner.ints[self._index]

    def __set__(self, owner: SharedState, value: int) -> None:
        owner.ints[self._index] = value


class _Float:
    """A float64 word of the shared block."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, owner: SharedState, kind: Any = None) -> float:
        return owner.floats[self._index]

    def __set__(self, owner: SharedState, value: float) -> None:
        owner.floats[self._index] = value


class _Text:
    """A text area; its length is stored after its bytes."""

    def __init__(self, length_index: int, offset: int) -> None:
        self._length_index = length_index
        self._offset = offset

    def __get__(self, owner: SharedState, kind: Any = None) -> str:
        size = owner.ints[self._length_index]
        return bytes(owner.bytes[self._offset : self._offset + size]).decode(errors="replace")

    def __set__(self, owner: SharedState, value: str) -> None:
        data = value.encode()[:_TEXT_BYTES]
        owner.bytes[self._offset : self._offset + len(data)] = data
        owner.ints[self._length_index] = len(data)


_TOTALS_AT = 64


class SharedState:
    """Typed view of the shared block. Instants are CLOCK_MONOTONIC nanoseconds, counters start at
    0.

    Written by the parent: ``command_seq`` ... ``frame_skip``. Written by the worker: everything
    else.
    """

    command_seq = _Int(0)
    active = _Int(1)
    stop = _Int(2)
    activation_count = _Int(3)
    budget_ns = _Int(4)
    max_det = _Int(5)
    frame_skip = _Int(6)
    confidence_threshold = _Float(7)
    nms_threshold = _Float(8)

    session_id = _Int(16)
    worker_state = _Int(17)
    heartbeat_ns = _Int(18)
    sequence = _Int(19)
    capture_count = _Int(20)
    deadline_count = _Int(21)
    inference_count = _Int(22)
    delivered_frames = _Int(23)
    source_state = _Int(24)
    stamp_source = _Int(25)
    epoch = _Int(26)
    last_frame_id = _Int(27)
    last_met_ns = _Int(28)
    first_exit_p99_ns = _Int(29)
    """End-to-end p99 of the first exit, measured at warm-up: decode, preprocess, segment 0,
    postprocess, publish.
    """
    warmup_done = _Int(30)
    warmup_total = _Int(31)
    exit_count = _Int(32)
    error_code = _Int(33)
    heartbeat_gap_max_ns = _Int(34)
    degraded = _Int(35)
    """1 while the primary backend is out or on trial."""
    backend_role = _Int(36)
    """Which backend runs the next frame: 0 the primary, 1 the fallback."""
    backend_switches = _Int(37)

    message = _Text(40, _WORDS * 8)
    """The worker's own words of what ended it."""
    report = _Text(41, _WORDS * 8 + _TEXT_BYTES)
    """RealtimeReport of the worker as JSON."""
    backend = _Text(42, _WORDS * 8 + 2 * _TEXT_BYTES)
    """What was selected, as JSON; see ``selection.Selected.report``."""
    backend_fault = _Text(43, _WORDS * 8 + 3 * _TEXT_BYTES)
    """Why the primary is out, or what the fallback's last rehearsal failed of; empty: nothing."""
    frame_fault = _Text(44, _WORDS * 8 + 4 * _TEXT_BYTES)
    """Why the newest FAILED frame failed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self.bytes = memoryview(self._map)
        words = self.bytes[: _WORDS * 8]
        self.ints = words.cast("q")
        self.floats = words.cast("d")

    @classmethod
    def create(cls) -> SharedState:
        """A new block of zeros, in a memfd that a child gets by ``pass_fds``."""
        fd = os.memfd_create("perception_rt_state", os.MFD_CLOEXEC)
        os.ftruncate(fd, _SIZE)
        return cls(fd)

    def add_outcome(self, outcome: Outcome) -> None:
        """Count one more frame with this outcome (worker only)."""
        self.ints[_TOTALS_AT + outcome] += 1

    @property
    def outcome_totals(self) -> list[int]:
        """Frames per outcome since the worker started, index: Outcome."""
        return self.ints[_TOTALS_AT : _TOTALS_AT + len(Outcome)].tolist()

    def close(self) -> None:
        """Unmap and close the descriptor."""
        self.ints.release()
        self.floats.release()
        self.bytes.release()
        self._map.close()
        os.close(self.fd)
