"""The GPU preprocess compiled by the host's C++ compiler (``host_cuda.cpp``): logic, no timing."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from perception_rt.detector.gpu_preprocess import KERNELS, SOURCE_NAME, Launch, kernel_source

_LETTERS = {"P": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}


class HostKernel:
    """Builds the kernel into ``folder`` and launches it on host memory."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / SOURCE_NAME, folder / "letterbox_host.so"
        source.write_text(kernel_source(), encoding="utf-8")
        subprocess.run(
            [
                *(os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-shared", "-fPIC"),
                *("-Wall", "-Wextra", "-Werror", "-ftrapv"),
                f'-DKERNEL_FILE="{source}"',
                f"-DKERNELS={' '.join(f'X({spec.entry})' for spec in KERNELS.values())}",
                *("-o", str(library), str(Path(__file__).with_name("host_cuda.cpp"))),
            ],
            check=True,
            timeout=100,
        )
        loaded = ctypes.CDLL(str(library))
        self._functions = {}
        for dtype, spec in KERNELS.items():
            address = ctypes.c_size_t.in_dll(loaded, f"host_{spec.entry}").value
            types = [ctypes.c_uint] * 4 + [_LETTERS[letter] for letter in spec.arg_format]
            self._functions[dtype] = ctypes.CFUNCTYPE(None, *types)(address)

    def run(self, dtype: str, launch: Launch) -> None:
        """Run one launch to its end; ``dtype`` is the output's."""
        block = KERNELS[dtype].block
        self._functions[dtype](*launch.grid[:2], *block[:2], *launch.args)
