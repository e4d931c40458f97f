"""What pycuda lacks, by ``cuda-bindings`` where that is installed: CUDA graphs, stream priority.

A segment is captured once, on a stream of the highest priority. Its kernels keep that priority as
node attributes, and the graph is instantiated to run by them (cuGraphInstantiate,
CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY), so that it may be launched on any stream, pycuda's
for one. Launching a graph is one driver call where a segment is dozens of kernel launches.

All of it belongs to the thread in which the context is current.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from perception_rt.core.errors import BackendError, UnavailableError

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the default stream
_USE_NODE_PRIORITY = 8


def load_bindings() -> Any:
    """The module ``cuda.bindings.driver``.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnavailableError(f"cuda-bindings cannot be imported ({error})") from None


class Graph:
    """A captured segment.

    Args:
        bindings: ``cuda.bindings.driver``.
        executable: CUgraphExec.
        stream_handle: of the stream that it will be launched on.
    """

    def __init__(self, bindings: Any, executable: Any, stream_handle: int) -> None:
        self._bindings = bindings
        self._executable = executable
        self._stream = bindings.CUstream(stream_handle)
        self._launch = bindings.cuGraphLaunch

    def launch(self) -> None:
        """Queue the segment.

        Raises:
            BackendError: the driver refused.
        """
        code = self._launch(self._executable, self._stream)[0]
        if code:
            raise BackendError(f"cuGraphLaunch: {code.name}")

    def close(self) -> None:
        """Free it; no launch may be in flight."""
        self._bindings.cuGraphExecDestroy(self._executable)


class Recorder:
    """Captures segments into graphs.

    Args:
        bindings: ``cuda.bindings.driver``.

    Attributes:
        priority: of the captured kernels; a lower number goes first, 0 is the usual one.

    Raises:
        BackendError: the driver refused.
    """

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        _, self.priority = self._call("cuCtxGetStreamPriorityRange")
        (self._stream,) = self._call("cuStreamCreateWithPriority", _NON_BLOCKING, self.priority)

    def capture(self, enqueue: Callable[[int], None], stream_handle: int) -> Graph:
        """Record what ``enqueue`` puts on the stream whose handle it is given.

        Args:
            enqueue: runs once, nothing of it on the device; it must have run plainly before.
            stream_handle: of the stream that the graph will be launched on.

        Raises:
            BackendError: ``enqueue`` raised it, or does what cannot be captured.
        """
        mode = self._bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        try:
            enqueue(int(self._stream))
        except BaseException:
            self._bindings.cuStreamEndCapture(self._stream)
            raise
        (graph,) = self._call("cuStreamEndCapture", self._stream)
        try:
            (executable,) = self._call("cuGraphInstantiate", graph, _USE_NODE_PRIORITY)
        finally:
            self._call("cuGraphDestroy", graph)
        return Graph(self._bindings, executable, stream_handle)

    def close(self) -> None:
        """Destroy the stream; graphs live on."""
        self._bindings.cuStreamDestroy(self._stream)

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        code, *values = getattr(self._bindings, name)(*args)
        if code:
            raise BackendError(f"{name}: {code.name}")
        return tuple(values)
