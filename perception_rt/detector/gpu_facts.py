"""Which GPU and driver this machine has, asked without pycuda: an engine fits only these.

The driver is asked through ctypes, so that "no driver" and "no GPU" are told apart before anything
that needs them is imported.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perception_rt.core.errors import UnavailableError

LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NO_DEVICE = 100
_FALLBACK = "or use backend onnxruntime"


@dataclass(frozen=True)
class GpuFacts:
    """The first GPU.

    Attributes:
        name: as the driver says it.
        sm: compute capability times ten, 87 for 8.7.
        driver: the CUDA version that the driver speaks, and its own release where that is known.
    """

    name: str
    sm: int
    driver: str

    @property
    def cuda_major(self) -> int:
        """Major CUDA version that the driver speaks; 0 where it is not known."""
        match = re.match(r"CUDA (\d+)", self.driver)
        return int(match.group(1)) if match else 0


def probe_gpu(library: str = LIBRARY, root: Path = Path("/")) -> GpuFacts:
    """Ask the driver for the first GPU. Initialises CUDA in this process, makes no context.

    Args:
        library: of the CUDA driver.
        root: where /proc and /etc are.

    Raises:
        UnavailableError: no driver, no GPU, or the driver refuses.
    """
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        raise UnavailableError(
            f"no NVIDIA driver ({error}): install it, on Jetson flash JetPack, in a container "
            f"start with --runtime nvidia; {_FALLBACK}"
        ) from error
    code = cuda.cuInit(0)
    if code == _NO_DEVICE:
        raise UnavailableError(
            "the NVIDIA driver sees no GPU: check nvidia-smi (Jetson: tegrastats), the "
            f"container's --gpus and CUDA_VISIBLE_DEVICES; {_FALLBACK}"
        )
    _check(cuda, "cuInit", code)
    device = ctypes.c_int()
    _check(cuda, "cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), 0))
    name = ctypes.create_string_buffer(256)
    _check(cuda, "cuDeviceGetName", cuda.cuDeviceGetName(name, len(name), device))
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        code = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        _check(cuda, "cuDeviceGetAttribute", code)
        numbers.append(value.value)
    version = ctypes.c_int()
    _check(cuda, "cuDriverGetVersion", cuda.cuDriverGetVersion(ctypes.byref(version)))
    cuda_text = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    release = driver_release(root)
    return GpuFacts(
        name.value.decode("utf-8", "replace"),
        10 * numbers[0] + numbers[1],
        f"{cuda_text}, {release}" if release else cuda_text,
    )


def driver_release(root: Path = Path("/")) -> str:
    """The driver's release (``560.35.03``), on Jetson Linux's (``L4T 36.4.3``); empty: unknown."""
    tegra = _text(root / "etc/nv_tegra_release")
    match = re.search(r"R(\d+).*?REVISION: *([\d.]+)", tegra)
    if match:
        return f"L4T {match.group(1)}.{match.group(2)}"
    match = re.search(
        r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _text(root / "proc/driver/nvidia/version")
    )
    return match.group(1) if match else ""


def _check(cuda: Any, call: str, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        named = cuda.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
        name = text.value.decode() if named and text.value else f"error {code}"
        raise UnavailableError(
            f"the NVIDIA driver refuses {call} ({name}): driver and kernel module may differ, "
            f"restart the machine after an update; {_FALLBACK}"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
