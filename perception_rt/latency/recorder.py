"""Every frame's record in shared memory: written by the worker, read by whoever started it."""

from __future__ import annotations

import mmap
import os
import struct

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.errors import InputError, UnavailableError, UsageError
from perception_rt.core.frame import RECORD_DTYPE, STAGE_COUNT, FrameRecord

MAGIC = b"PRTREC01"
HEADER_SIZE = 64

_U64 = struct.Struct("<Q")
_IDENTITY = struct.Struct("<8sQQ")  # magic, capacity, bytes of one row
_COUNT_AT = 24
_OVERFLOW_AT = 32
_ROW = struct.Struct(f"<QIIBBbBI5q{2 * STAGE_COUNT}q")
assert _ROW.size == RECORD_DTYPE.itemsize


class Recorder:
    """An array of ``RECORD_DTYPE`` rows behind a header, in a memfd. One writer; any number of
    readers.

    It never overwrites: a record that finds the array full is counted in ``overflow``, and a run
    with an overflow above 0 measured something unknown. All pages are touched when it is mapped,
    so ``append`` causes no page fault; it costs one tuple and one ``struct`` call, about 5 us.

    The row is written before ``count``; a reader that needs the very last row must still wait for
    the writer to be done, because nothing orders the two stores on every processor.
    """

    def __init__(self, fd: int, owned: bool) -> None:
        """Use ``create`` or ``attach``."""
        self.fd = fd
        self._owned = owned
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(fd, os.fstat(fd).st_size, flags=flags)
        magic, capacity, row_size = _IDENTITY.unpack_from(self._map, 0)
        size = HEADER_SIZE + capacity * RECORD_DTYPE.itemsize
        if magic != MAGIC or row_size != RECORD_DTYPE.itemsize or len(self._map) != size:
            self._map.close()
            raise InputError(
                f"file descriptor {fd} holds no record array of this version: create a new one"
            )
        self.capacity: int = capacity
        self._count = self.count

    @classmethod
    def create(cls, capacity: int) -> Recorder:
        """Make an empty array for ``capacity`` records; ``fd`` can be handed to a child process
        (``pass_fds``).

        Raises:
            UsageError: ``capacity`` below 1.
            UnavailableError: the system does not give the memory.
        """
        if capacity < 1:
            raise UsageError(f"a recorder needs room for at least 1 record, got {capacity}")
        size = HEADER_SIZE + capacity * RECORD_DTYPE.itemsize
        fd = -1
        try:
            fd = os.memfd_create("perception_rt_records", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            os.pwrite(fd, _IDENTITY.pack(MAGIC, capacity, RECORD_DTYPE.itemsize), 0)
            return cls(fd, owned=True)
        except (OSError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            raise UnavailableError(
                f"no memory for {capacity} records ({size / 1e6:.0f} MB): {error};"
                " ask for a shorter run or free memory"
            ) from None

    @classmethod
    def attach(cls, fd: int) -> Recorder:
        """Map an array that another process created; ``close`` leaves ``fd`` open.

        Raises:
            InputError: ``fd`` is something else.
        """
        try:
            size = os.fstat(fd).st_size
        except OSError as error:
            raise InputError(
                f"file descriptor {fd} of the record array cannot be used: {error}"
            ) from error
        if size < HEADER_SIZE:
            raise InputError(
                f"file descriptor {fd} holds {size} bytes, too few for a record array"
            )
        return cls(fd, owned=False)

    @property
    def count(self) -> int:
        """Records written."""
        return int(_U64.unpack_from(self._map, _COUNT_AT)[0])

    @property
    def overflow(self) -> int:
        """Records that found the array full and are lost."""
        return int(_U64.unpack_from(self._map, _OVERFLOW_AT)[0])

    def append(self, record: FrameRecord) -> bool:
        """Write one record; False, and counted, when the array is full. For the writer only."""
        count = self._count
        if count >= self.capacity:
            _U64.pack_into(self._map, _OVERFLOW_AT, self.overflow + 1)
            return False
        *scalars, start_ns, end_ns = record.as_row()
        offset = HEADER_SIZE + count * _ROW.size
        _ROW.pack_into(self._map, offset, *scalars, *start_ns, *end_ns)
        self._count = count + 1
        _U64.pack_into(self._map, _COUNT_AT, count + 1)
        return True

    def records(self) -> NDArray[np.void]:
        """A copy of the records written so far, ``RECORD_DTYPE`` [count], in order."""
        return np.frombuffer(self._map, RECORD_DTYPE, self.count, HEADER_SIZE).copy()

    def close(self) -> None:
        """Unmap; close ``fd`` too where this object created it."""
        self._map.close()
        if self._owned:
            os.close(self.fd)
            self._owned = False
