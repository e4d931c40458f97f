"""The names of ``tensorrt`` that the back end uses, over a kernel that only waits: it stands for a
segment on a GPU where TensorRT is missing.

The rest is real: driver, streams, events, asynchronous launches, device memory. A plan is made by
``plan``. A segment waits ``spin_ns`` on the device, then writes: with x the first element of its
last input, every element of the detection tensor is x + 1, every element of its features is x + 1.
So with exit k, behind an input whose first element is i, the detections are i + k + 1 everywhere,
which only holds if the features went from segment to segment.

``contexts`` holds the execution contexts that are alive. What is loaded in a thread where no
context is current, or released there, is counted in ``misplaced``: the back end must do both in
the thread that owns the context.
"""

from __future__ import annotations

import ctypes
import json
import math
import weakref
from enum import IntEnum
from typing import Any

import numpy as np
from support.gpu_driver import Driver, DriverError, find_gpu, pack

from perception_rt.detector.kernel_compiler import compile_cubin
from perception_rt.detector.model import Model

__version__ = "10.0.0.spin"

RUN, NAN, TRAP = "run", "nan", "trap"
"""What a segment does with a bright image (pixels above 127): its work; NaN into the detections; a
fault that breaks the context. With a dark one it does its work, so that it can be loaded.
"""

_MAGIC = b"SPIN"
_MODES = {RUN: 0, NAN: 1, TRAP: 2}
_MAX_FEATURES = 4
_THREADS = 256
_SOURCE = """
struct Outputs { float *at[5]; unsigned size[5]; };

extern "C" __global__ void spin_segment(
    const float *input, Outputs outputs, int count, int mode, float bright,
    unsigned long long spin_ns)
{
    if (input[0] <= bright)
        mode = 0;
    if (threadIdx.x == 0) {
        unsigned long long begin, now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
        do {
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        } while (now - begin < spin_ns);
        if (mode == 2)
            asm volatile("trap;");
    }
    __syncthreads();
    const float value = input[0] + 1.0f;
    for (int k = 0; k < count; ++k)
        for (unsigned i = threadIdx.x; i < outputs.size[k]; i += blockDim.x)
            outputs.at[k][i] = k == 0 && mode == 1 ? __int_as_float(0x7fc00000) : value;
}
"""


class _Outputs(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p * (_MAX_FEATURES + 1)),
        ("size", ctypes.c_uint * (_MAX_FEATURES + 1)),
    )


class Misplaced:
    """How often something was done in a thread where no context was current."""

    def __init__(self) -> None:
        self.loads = 0
        self.releases = 0


misplaced = Misplaced()
_cubin: list[bytes] = []

contexts: weakref.WeakSet[Context] = weakref.WeakSet()


def plan(model: Model, k: int, spin_ns: int = 0, mode: str = RUN) -> bytes:
    """A plan for segment ``k`` of ``model``."""
    segment = model.segments[k]
    tensors = [[t.name, list(t.shape), "input"] for t in segment.inputs]
    tensors.append([segment.output.name, list(segment.output.shape), "output"])
    tensors += [[t.name, list(t.shape), "output"] for t in segment.features]
    content = {"tensors": tensors, "spin_ns": spin_ns, "mode": mode, "bright": k + 0.5}
    return _MAGIC + json.dumps(content).encode()


def plans(model: Model, spin_ns: int = 0) -> list[bytes]:
    """A plan for every segment of ``model``."""
    return [plan(model, k, spin_ns) for k in range(len(model.segments))]


class TensorIOMode(IntEnum):
    """As in TensorRT."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(IntEnum):
    """As in TensorRT."""

    DEVICE = 0
    HOST = 1


class DataType(IntEnum):
    """As in TensorRT."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5


def nptype(kind: DataType) -> type:
    """The NumPy type of a TensorRT type."""
    return {DataType.FLOAT: np.float32, DataType.HALF: np.float16, DataType.UINT8: np.uint8}[kind]


class Logger:
    """As in TensorRT; says nothing."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self, min_severity: int = WARNING) -> None:
        self.min_severity = min_severity


class Runtime:
    """As in TensorRT."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, serialized: bytes) -> Engine | None:
        """The engine of a plan, None when it is not one, as TensorRT does."""
        data = bytes(serialized)
        if not data.startswith(_MAGIC):
            return None
        try:
            content = json.loads(data[len(_MAGIC) :])
        except ValueError:
            return None
        return Engine(content)


class Engine:
    """As ``ICudaEngine``."""

    num_aux_streams = 0
    num_optimization_profiles = 1
    name = "spin"

    def __init__(self, content: dict[str, Any]) -> None:
        self.spin_ns: int = content["spin_ns"]
        self.mode = _MODES[content["mode"]]
        self.bright: float = content["bright"]
        self._tensors = [
            (name, tuple(shape), TensorIOMode.INPUT if use == "input" else TensorIOMode.OUTPUT)
            for name, shape, use in content["tensors"]
        ]
        self.driver = Driver()
        misplaced.loads += self.driver.current() == 0
        gpu = find_gpu()
        if isinstance(gpu, str):
            raise DriverError(gpu)
        if not _cubin:
            _cubin.append(compile_cubin(_SOURCE, "spin.cu", gpu.sm, gpu.cuda_major).data)
        self._module = self.driver.load(_cubin[0])
        self.function = self.driver.function(self._module, "spin_segment")

    def __del__(self) -> None:
        module = getattr(self, "_module", None)
        if module is None:
            return
        try:
            self.driver.unload(module)
        except DriverError:
            misplaced.releases += 1

    @property
    def num_io_tensors(self) -> int:
        """As in TensorRT."""
        return len(self._tensors)

    def get_tensor_name(self, index: int) -> str:
        """As in TensorRT."""
        return self._tensors[index][0]

    def _tensor(self, name: str) -> tuple[str, tuple[int, ...], TensorIOMode]:
        return next(tensor for tensor in self._tensors if tensor[0] == name)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """As in TensorRT."""
        return self._tensor(name)[1]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        """As in TensorRT."""
        return self._tensor(name)[2]

    def get_tensor_dtype(self, name: str) -> DataType:
        """As in TensorRT."""
        self._tensor(name)
        return DataType.FLOAT

    def get_tensor_location(self, name: str) -> TensorLocation:
        """As in TensorRT."""
        self._tensor(name)
        return TensorLocation.DEVICE

    def create_execution_context(self) -> Context:
        """As in TensorRT."""
        return Context(self)


class Context:
    """As ``IExecutionContext``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.addresses: dict[str, int] = {}
        self._parameters: Any = None
        contexts.add(self)

    def set_tensor_address(self, name: str, address: int) -> bool:
        """As in TensorRT."""
        if not address or address % 256 or name not in [t[0] for t in self.engine._tensors]:
            return False
        self.addresses[name] = int(address)
        self._parameters = None
        return True

    def output_bytes(self) -> list[tuple[int, int]]:
        """Address and size of every output."""
        return [
            (self.addresses[name], 4 * math.prod(shape))
            for name, shape, mode in self.engine._tensors
            if mode == TensorIOMode.OUTPUT
        ]

    def get_tensor_address(self, name: str) -> int:
        """As in TensorRT."""
        return self.addresses.get(name, 0)

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Queue the kernel; False when an address is missing or the launch failed."""
        if len(self.addresses) != self.engine.num_io_tensors:
            return False
        if self._parameters is None:
            self._parameters = self._pack()
        try:
            self.engine.driver.launch(
                self.engine.function,
                (1, 1, 1),
                (_THREADS, 1, 1),
                self._parameters,
                int(stream_handle),
            )
        except DriverError:
            return False
        return True

    def _pack(self) -> Any:
        tensors = self.engine._tensors
        last_input = [name for name, _, mode in tensors if mode == TensorIOMode.INPUT][-1]
        written = [(name, shape) for name, shape, mode in tensors if mode == TensorIOMode.OUTPUT]
        outputs = _Outputs()
        for i, (name, shape) in enumerate(written):
            outputs.at[i] = self.addresses[name]
            outputs.size[i] = math.prod(shape)
        return pack(
            ctypes.c_void_p(self.addresses[last_input]),
            outputs,
            ctypes.c_int(len(written)),
            ctypes.c_int(self.engine.mode),
            ctypes.c_float(self.engine.bright),
            ctypes.c_uint64(self.engine.spin_ns),
        )
