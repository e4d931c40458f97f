"""The CUDA driver through ctypes: what the GPU tests need besides pycuda.

Nothing is loaded at import. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
from typing import Any

from perception_rt.core.errors import UnavailableError
from perception_rt.detector.gpu_facts import LIBRARY, GpuFacts, probe_gpu

STAND_IN = "stand-in"
"""Part of the device name of the host stand-in driver, which is no GPU."""


class DriverError(RuntimeError):
    """A driver call that failed."""


def find_gpu() -> GpuFacts | str:
    """The first device, or the reason why there is none."""
    try:
        facts = probe_gpu()
    except UnavailableError as error:
        return str(error)
    if STAND_IN in facts.name:
        return f"{LIBRARY} is the host stand-in, not a driver"
    return facts


class Driver:
    """Driver calls that raise DriverError. A context must be current where memory is touched."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL(LIBRARY)
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``name``; raise if it does not return CUDA_SUCCESS."""
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            reason = (text.value or b"error").decode()
            raise DriverError(f"{name} failed with {reason} ({code})")

    def retain(self) -> ctypes.c_void_p:
        """Take a reference to the primary context of device 0, without making it current."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        return context

    def release(self) -> None:
        """Give that reference back."""
        self.call("cuDevicePrimaryCtxRelease_v2", 0)

    def push(self, context: ctypes.c_void_p) -> None:
        """Make ``context`` current in this thread."""
        self.call("cuCtxPushCurrent_v2", context)

    def pop(self) -> None:
        """Undo ``push``."""
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def current(self) -> int:
        """Address of the context that is current in this thread, 0 for none."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    def free_bytes(self) -> int:
        """Free memory of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, size: int) -> int:
        """Address of ``size`` bytes of device memory."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        """Give device memory back."""
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def fill(self, address: int, size: int, byte: int) -> None:
        """Set ``size`` bytes at ``address``, and wait for it."""
        self.call("cuMemsetD8_v2", ctypes.c_uint64(address), byte, ctypes.c_size_t(size))
        self.call("cuCtxSynchronize")

    def upload(self, address: int, data: Any) -> None:
        """Copy a contiguous array to the device."""
        self.call(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(address),
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.nbytes),
        )

    def download(self, data: Any, address: int) -> None:
        """Fill a contiguous array from the device."""
        self.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_uint64(address),
            ctypes.c_size_t(data.nbytes),
        )

    def load(self, image: bytes) -> ctypes.c_void_p:
        """A module from a cubin or PTX."""
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        return module

    def unload(self, module: ctypes.c_void_p) -> None:
        """Give a module back."""
        self.call("cuModuleUnload", module)

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """A kernel of a module."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        parameters: Any,
        stream: int = 0,
    ) -> None:
        """Queue a kernel; ``parameters`` is what ``pack`` made, and must stay alive."""
        self.call(
            "cuLaunchKernel", function, *grid, *block, 0, ctypes.c_void_p(stream), parameters, None
        )


def pack(*values: Any) -> Any:
    """Kernel parameters from ctypes values, for ``Driver.launch``."""
    array = (ctypes.c_void_p * len(values))(
        *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
    )
    array.keep = values  # type: ignore[attr-defined]
    return array
