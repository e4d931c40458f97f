"""Builds the stand-in for the CUDA driver: ``build.py OUTPUT_FOLDER CUDA_HEADERS``.

Every driver function that cuda.h declares and the C sources here do not define answers
CUDA_ERROR_NOT_SUPPORTED, so that whatever links against a driver loads.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("standin_device.c", "standin_streams.c")
_DECLARED = re.compile(r"CUDAAPI\s+(cu[A-Z]\w*)\s*\(")
_RENAMED = re.compile(r"#\s*define\s+cu[A-Z]\w*\s+(?:__CUDA_API_\w+\()?(cu[A-Z]\w*)")


def driver_functions(header: str) -> list[str]:
    """Names of all functions that the text of cuda.h declares, versions such as ``_v2`` too."""
    names = {*_DECLARED.findall(header), *_RENAMED.findall(header)}
    return sorted({*names, "cuProfilerInitialize", "cuProfilerStart", "cuProfilerStop"})


def build(output: Path, headers: Path) -> Path:
    """Compile ``libcuda.so.1`` into ``output``; returns its path.

    Raises:
        FileNotFoundError: no cuda.h in ``headers``, or no C compiler.
        subprocess.CalledProcessError: it does not compile.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler: install gcc")
    names = driver_functions((headers / "cuda.h").read_text())
    output.mkdir(parents=True, exist_ok=True)
    defaults = output / "defaults.c"
    attributes = '__attribute__((weak, section("standin_defaults")))'
    defaults.write_text(
        "".join(f"{attributes} int {name}(void) {{ return 801; }}\n" for name in names)
    )
    library = output / "libcuda.so.1"
    partial = output / "libcuda.so.partial"
    command = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-O2", "-shared", "-fPIC", "-pthread"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", str(partial)]
    sources = [str(HERE / name) for name in SOURCES]
    subprocess.run([*command, *sources, str(defaults), "-ldl"], check=True)
    partial.replace(library)
    link = output / "libcuda.so"
    link.unlink(missing_ok=True)
    link.symlink_to(library.name)
    return library


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: build.py OUTPUT_FOLDER CUDA_HEADERS")
    build(Path(sys.argv[1]), Path(sys.argv[2]))
