"""TEST CODE. A stand-in for what is used here of ``tensorrt``, over the stand-in driver.

A "plan" is the ONNX file of a segment. Running one is ONNX Runtime on the bound addresses, which
are host memory under the stand-in driver, behind a delay on the stream. It shares names and rules
(None and False for errors, asynchrony, addresses) with TensorRT, and no numbers and no times.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any

import numpy as np
import onnxruntime as ort
from support.standin_driver import StandInDriver

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_TYPES = {"tensor(float)": 0, "tensor(float16)": 1}


class TensorIOMode(IntEnum):
    """As in TensorRT."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2


class DataType(IntEnum):
    """As in TensorRT."""

    FLOAT = 0
    HALF = 1


class Logger:
    """As in TensorRT; says nothing."""

    WARNING = 2

    def __init__(self, min_severity: int = WARNING) -> None:
        self.min_severity = min_severity


class StandInTrt:
    """Takes the place of the module ``tensorrt``.

    Attributes:
        completions: (segment, instant of the device's clock) of every run, as it ended.
        refusing: segments whose enqueueing fails.
        raising: segments that fail on the device: their outputs become NaN.
        uncapturable: segments that cannot be captured into a graph.
        contextless: segments for which no execution context can be made.
    """

    __version__ = "10.3.0"
    Logger = Logger
    TensorIOMode = TensorIOMode
    DataType = DataType

    def __init__(self, driver: StandInDriver) -> None:
        self.driver = driver
        self.completions: list[tuple[int, int]] = []
        self.refusing: set[int] = set()
        self.raising: set[int] = set()
        self.uncapturable: set[int] = set()
        self.contextless: set[int] = set()

    def Runtime(self, logger: Any) -> Runtime:
        """As in TensorRT."""
        return Runtime(self)

    @staticmethod
    def nptype(kind: Any) -> type:
        """As in TensorRT."""
        return {DataType.FLOAT: np.float32, DataType.HALF: np.float16}[kind]


class Runtime:
    """As in TensorRT."""

    def __init__(self, trt: StandInTrt) -> None:
        self._trt = trt
        self._segments = 0

    def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
        """Engines count as the segments 0, 1, 2, ... in the order of loading."""
        try:
            engine = Engine(self._trt, self._segments, plan)
        except Exception:  # noqa: BLE001 (like TensorRT: it says so elsewhere and returns None)
            return None
        self._segments += 1
        return engine


class Engine:
    """As ``ICudaEngine``."""

    def __init__(self, trt: StandInTrt, segment: int, plan: bytes) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = ort.InferenceSession(plan, options, providers=["CPUExecutionProvider"])
        self.trt = trt
        self.segment = segment
        self.tensors = {
            node.name: (node, TensorIOMode.INPUT) for node in self.session.get_inputs()
        }
        for node in self.session.get_outputs():
            self.tensors[node.name] = (node, TensorIOMode.OUTPUT)

    @property
    def num_io_tensors(self) -> int:
        """As in TensorRT."""
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        """As in TensorRT."""
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        """As in TensorRT."""
        return self.tensors[name][1]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """As in TensorRT."""
        return tuple(self.tensors[name][0].shape)

    def get_tensor_dtype(self, name: str) -> DataType:
        """As in TensorRT."""
        return DataType(_TYPES[self.tensors[name][0].type])

    def create_execution_context(self) -> Context | None:
        """As in TensorRT."""
        return None if self.segment in self.trt.contextless else Context(self)


class Context:
    """As ``IExecutionContext``. What is queued keeps the addresses it was queued with."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._addresses: dict[str, int] = {}
        self._queued: dict[tuple[int, ...], Any] = {}

    def set_tensor_address(self, name: str, address: int) -> bool:
        """As in TensorRT, which wants addresses to be multiples of 256."""
        if name not in self._engine.tensors or not address or address % 256:
            return False
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        """As in TensorRT."""
        engine = self._engine
        trt, library = engine.trt, engine.trt.driver.library
        stream = ctypes.c_void_p(stream_handle)
        if self._addresses.keys() != engine.tensors.keys():
            return False
        if engine.segment in trt.refusing:
            return False
        if engine.segment in trt.uncapturable and library.standin_capturing(stream):
            library.standin_break_capture(stream)
            return False
        key = tuple(self._addresses.values())
        if key not in self._queued:
            self._queued[key] = self._host_function()
        return (
            library.standin_delay(stream, engine.segment) == 0
            and library.cuLaunchHostFunc(stream, self._queued[key], None) == 0
        )

    def _host_function(self) -> Any:
        engine = self._engine
        binding = engine.session.io_binding()
        outputs = []
        for name, (node, mode) in engine.tensors.items():
            dtype = StandInTrt.nptype(engine.get_tensor_dtype(name))
            bind = binding.bind_input if mode == TensorIOMode.INPUT else binding.bind_output
            bind(name, "cpu", 0, dtype, node.shape, self._addresses[name])
            if mode == TensorIOMode.OUTPUT:
                size = int(np.prod(node.shape)) * np.dtype(dtype).itemsize
                outputs.append((self._addresses[name], size))
        trt, segment = engine.trt, engine.segment

        def run(_: Any) -> None:
            for address, size in outputs:
                ctypes.memset(address, 0xFF, size)
            if segment not in trt.raising:
                engine.session.run_with_iobinding(binding)
            trt.completions.append((segment, int(trt.driver.library.standin_now())))

        return _HOST_FUNCTION(run)
