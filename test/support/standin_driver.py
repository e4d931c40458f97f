"""TEST CODE: what tests ask of the stand-in driver (``standin_cuda/``); see its C sources."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from perception_rt.detector.gpu_preprocess import KERNELS, SOURCE_NAME, kernel_source

LIBRARY = "libcuda.so.1"

NOTHING_LEFT = (0,) * 11
"""``Counts.left`` when all is well."""


def preprocess_module(folder: Path) -> bytes:
    """What stands for the compiled preprocess kernel: built into ``folder`` for the host."""
    source, library = folder / SOURCE_NAME, folder / "letterbox_standin.so"
    source.write_text(kernel_source(), encoding="utf-8")
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-shared", "-fPIC"]
    command += [f'-DKERNEL_FILE="{source}"', "-o", str(library)]
    command += [f"-DKERNELS={' '.join(f'X({spec.entry})' for spec in KERNELS.values())}"]
    command += [str(Path(__file__).with_name("standin_kernel.cpp"))]
    subprocess.run(command, check=True, timeout=100)
    return str(library).encode() + b"\0"


class Counts(NamedTuple):
    """What the stand-in driver counts: what is left, what was never wanted, what grows."""

    device_blocks: int
    pinned_blocks: int
    streams: int
    events: int
    graphs: int
    modules: int
    pushed_contexts: int
    retained_contexts: int
    foreign_calls: int
    default_stream_uses: int
    pageable_copies: int
    allocations: int
    queries: int
    records: int

    @property
    def left(self) -> tuple[int, ...]:
        """What has to be 0 when everything is closed, and what has to be 0 always."""
        return tuple(self)[:11]


class StandInDriver:
    """The driver of this process, if it is the stand-in.

    Raises:
        OSError: no driver, or a real one.
    """

    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        if not hasattr(self.library, "standin_counts"):
            raise OSError(f"{LIBRARY} of this process is a real driver")
        self.library.standin_next.restype = ctypes.c_int64
        self.library.standin_now.restype = ctypes.c_int64
        self.library.standin_capacity.argtypes = [ctypes.c_size_t]

    def counts(self) -> Counts:
        """All counters."""
        values = (ctypes.c_long * len(Counts._fields))()
        self.library.standin_counts(values)
        return Counts(*values)

    def reset(self) -> None:
        """Real time, a discrete GPU of 8 GiB, nothing asked to fail. No stream may be alive."""
        self.library.standin_manual(0)
        self.library.standin_integrated(0)
        self.library.standin_capacity(8 << 30)
        self.library.standin_forget_durations()
        self.library.standin_fail(b"", 0, 0, 0)
        self.library.standin_reset_counts()

    def manual(self, now_ns: int) -> None:
        """From now on time stands still on the device; before streams are made."""
        self.library.standin_manual(1)
        self.advance(now_ns)

    def integrated(self) -> None:
        """The GPU shares the memory of the CPU."""
        self.library.standin_integrated(1)

    def capacity(self, size_bytes: int) -> None:
        """How much memory the device has."""
        self.library.standin_capacity(size_bytes)

    def advance(self, now_ns: int) -> None:
        """Move the device's manual clock, and end what is due."""
        self.library.standin_advance(ctypes.c_int64(now_ns))

    def next_end_ns(self) -> int:
        """When the next work ends; -1: none is queued."""
        return int(self.library.standin_next())

    def duration(self, segment: int, ns: int) -> None:
        """How long a coming run of ``segment`` takes; in the order in which they begin."""
        self.library.standin_duration(segment, ctypes.c_int64(ns))

    def fail(self, function: str, code: int, after: int = 0, sticky: bool = False) -> None:
        """Let a call of ``function`` answer ``code``; sticky: all later ones too."""
        self.library.standin_fail(function.encode(), code, after, int(sticky))

    def forgive(self) -> None:
        """Count what a broken context held as freed: it went with the context."""
        self.library.standin_forgive()
