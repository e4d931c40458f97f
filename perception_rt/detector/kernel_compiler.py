"""CUDA C++ text to a cubin, when engines are built: by NVRTC, else by nvcc. Needs no GPU.

NVRTC is tried first: it runs in this process and needs neither a host compiler nor pycuda. It
comes with the pip packages nvidia-cuda-nvrtc-cu12 (CUDA 12) and nvidia-cuda-nvrtc (CUDA 13) or
with the CUDA toolkit of JetPack, where nvcc is usually installed as well but not on PATH.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from perception_rt.core.errors import BackendError, UnavailableError

_TOOLKIT = Path("/usr/local/cuda")
_LOADER_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_NVCC_TIMEOUT_S = 300
_OPTIONS = ("-std=c++14",)
_REMEDY = (
    "install the pip package nvidia-cuda-nvrtc-cu12 (driver for CUDA 12) or nvidia-cuda-nvrtc "
    "(CUDA 13 or later), on Jetson the CUDA toolkit of its JetPack: apt install nvidia-jetpack"
)


class Cubin(NamedTuple):
    """A compiled kernel.

    Attributes:
        data: the ELF image for one SM, as cuModuleLoadData takes it.
        compiler: what made it, as "NVRTC 12.9" or "nvcc 13.0".
    """

    data: bytes
    compiler: str


class Compiler(Protocol):
    """One CUDA compiler of one version.

    Attributes:
        name: "NVRTC 12.9".
        version: CUDA version, major and minor.
        sms: what it can compile for, 87 for compute capability 8.7.
    """

    name: str
    version: tuple[int, int]
    sms: tuple[int, ...]

    def compile(self, source: str, file_name: str, sm: int) -> bytes:
        """The cubin of ``source``; ``file_name`` is what messages call it.

        Raises:
            BackendError: the compiler refuses the source; holds its first error.
        """


def compile_cubin(source: str, file_name: str, sm: int, cuda_major: int | None = None) -> Cubin:
    """Compile with the first compiler that knows the SM.

    Args:
        source: CUDA C++ that includes nothing.
        file_name: what messages call it.
        sm: compute capability times ten, 87 for Orin.
        cuda_major: CUDA version of the driver, which does not load what a later major version
            compiled; None: any.

    Raises:
        UnavailableError: no compiler, or none for this SM and driver; lists those that were found.
        BackendError: the compiler refuses the source.
    """
    found = []
    for compiler in compilers():
        if sm in compiler.sms and (cuda_major is None or compiler.version[0] <= cuda_major):
            return Cubin(compiler.compile(source, file_name, sm), compiler.name)
        found.append(f"{compiler.name} (SM {', '.join(map(str, compiler.sms))})")
    wanted = f"{file_name} for SM {sm}" + (f" and CUDA {cuda_major}" if cuda_major else "")
    raise UnavailableError(
        f"no CUDA compiler for {wanted}; found: {'; '.join(found) or 'none'}: {_REMEDY}"
    )


def compilers() -> Iterator[Compiler]:
    """Every CUDA compiler of this machine, the preferred ones first."""
    seen = set()
    for library in _nvrtc_libraries():
        try:
            nvrtc = Nvrtc(library)
        except (OSError, AttributeError):  # not there, or not a complete NVRTC
            continue
        if nvrtc.name not in seen:
            seen.add(nvrtc.name)
            yield nvrtc
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=str(_TOOLKIT / "bin"))
    if nvcc is not None:
        try:
            yield Nvcc(nvcc)
        except (OSError, subprocess.SubprocessError):
            return


def _nvrtc_libraries() -> Iterator[str]:
    """Paths in pip packages and in the toolkit, then names for the loader."""
    wheels = importlib.util.find_spec("nvidia")
    folders = [
        Path(root, part, "lib")
        for root in (wheels.submodule_search_locations or () if wheels else ())
        for part in ("cuda_nvrtc", "cu13")
    ]
    for folder in (*folders, _TOOLKIT / "lib64"):
        yield from sorted((str(path) for path in folder.glob("libnvrtc.so.*")), reverse=True)
    yield from _LOADER_NAMES


class Nvrtc:
    """NVRTC through ctypes: functions and result codes of NVIDIA's nvrtc.h, CUDA 11.2 and later.

    Raises:
        OSError: the library cannot be loaded or does not work.
        AttributeError: it lacks a function that is used here.
    """

    def __init__(self, library: str) -> None:
        self._lib = ctypes.CDLL(library)
        for function in (
            "nvrtcVersion",
            "nvrtcGetNumSupportedArchs",
            "nvrtcGetSupportedArchs",
            "nvrtcCreateProgram",
            "nvrtcCompileProgram",
            "nvrtcDestroyProgram",
            "nvrtcGetProgramLogSize",
            "nvrtcGetProgramLog",
            "nvrtcGetCUBINSize",
            "nvrtcGetCUBIN",
        ):
            getattr(self._lib, function).restype = ctypes.c_int
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        self.name = f"NVRTC {major.value}.{minor.value}"
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        sms = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", sms)
        self.sms = tuple(sms)

    def compile(self, source: str, file_name: str, sm: int) -> bytes:
        """The cubin of ``source``; see ``Compiler``."""
        options = [option.encode() for option in (f"--gpu-architecture=sm_{sm}", *_OPTIONS)]
        program = ctypes.c_void_p()
        self._call(
            "CreateProgram",
            ctypes.byref(program),
            ctypes.c_char_p(source.encode()),
            ctypes.c_char_p(file_name.encode()),
            0,
            None,
            None,
        )
        try:
            code = self._lib.nvrtcCompileProgram(
                program, len(options), (ctypes.c_char_p * len(options))(*options)
            )
            if code != 0:
                log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise _refused(self.name, file_name, sm, log or self._reason(code))
            return self._text(program, "CUBIN")
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, data)
        return data.raw

    def _call(self, function: str, *args: object) -> None:
        code = getattr(self._lib, f"nvrtc{function}")(*args)
        if code != 0:
            raise OSError(f"nvrtc{function} failed: {self._reason(code)}")

    def _reason(self, code: int) -> str:
        text: bytes = self._lib.nvrtcGetErrorString(code)
        return text.decode(errors="replace")


class Nvcc:
    """nvcc as a program; it needs a host C++ compiler beside it.

    Raises:
        OSError, SubprocessError: it does not run or does not say its version.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        release = re.search(r"release (\d+)\.(\d+)", self._ask("--version"))
        if release is None:
            raise OSError(f"{path} --version does not say its version")
        self.version = (int(release[1]), int(release[2]))
        self.name = f"nvcc {release[1]}.{release[2]}"
        self.sms = tuple(int(sm) for sm in re.findall(r"sm_(\d+)\b", self._ask("--list-gpu-code")))

    def compile(self, source: str, file_name: str, sm: int) -> bytes:
        """The cubin of ``source``; see ``Compiler``."""
        with tempfile.TemporaryDirectory(prefix="perception_rt_nvcc_") as folder:
            text, cubin = Path(folder, file_name), Path(folder, "out.cubin")
            text.write_text(source, encoding="utf-8")
            arguments = [f"--gpu-architecture=sm_{sm}", *_OPTIONS, "--cubin", "-o", str(cubin)]
            try:
                done = subprocess.run(
                    [self._path, *arguments, file_name],
                    check=False,
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=_NVCC_TIMEOUT_S,
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise _refused(self.name, file_name, sm, str(error)) from error
            if done.returncode != 0 or not cubin.is_file():
                raise _refused(self.name, file_name, sm, done.stderr or done.stdout)
            return cubin.read_bytes()

    def _ask(self, option: str) -> str:
        return subprocess.run(
            [self._path, option],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_NVCC_TIMEOUT_S,
        ).stdout


def _refused(compiler: str, file_name: str, sm: int, log: str) -> BackendError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reason = next((line for line in lines if "error" in line), lines[0] if lines else "no reason")
    return BackendError(
        f"{compiler} does not compile {file_name} for SM {sm}: {reason}: "
        "try another CUDA version, or use the onnxruntime backend"
    )
