"""The segments of a model as TensorRT engines, and all the memory they use, in one CUDA context.

Everything here belongs to the one thread that makes a ``GpuNetwork``: it makes, uses and frees
whatever lies on the device, and pushes and pops the context. ``tensorrt`` and ``pycuda.driver``
are handed in; of TensorRT only what exists in every version from 8.6 to 11 is used.

There are two sets of input, features and heads, so that a frame can be queued while the one
before still drains. Features never leave the device: the segment that writes one and those that
read it are given the same address. Where the GPU shares the memory of the CPU (Jetson), input and
heads are host memory mapped into the device; elsewhere they are copied from and to pinned memory.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.errors import BackendError, PerceptionRtError, UnavailableError
from perception_rt.detector.backend import PREPROCESS
from perception_rt.detector.cuda_graphs import Graph, Recorder, load_bindings
from perception_rt.detector.gpu_preprocess import KERNELS, ImageLayout, PixelFormat, launch
from perception_rt.detector.handover import fault_text
from perception_rt.detector.model import InputSpec, Model, SegmentSpec
from perception_rt.detector.preprocess import Letterbox, Preprocessor

OLDEST_TENSORRT = (8, 6)
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the default stream
_REBUILD = "build it again with 'perception_rt model build'"


class BufferSet:
    """Input, features, heads and events of one frame in flight.

    Attributes:
        views: detection tensor of each exit, float32 [A, 4 + C], in host memory.
        events: of each step that ends on the device; preprocess first.
    """

    def __init__(self) -> None:
        self.input: NDArray[np.float32] | None = None
        self.input_device: Any = None
        self.input_address = 0
        self.staging: NDArray[np.uint8] | None = None
        self.staging_device: Any = None
        self.staging_address = 0
        self.features: list[Any] = []
        self.heads: list[NDArray[np.float32]] = []
        self.head_devices: list[Any] = []
        self.views: list[NDArray[np.float32]] = []
        self.addresses: list[list[tuple[str, int]]] = []
        self.events: list[Any] = []
        self.graphs: list[Graph] = []


class GpuNetwork:
    """Loads the engines of a model and runs every segment once in each set of buffers.

    Args:
        trt: module ``tensorrt``.
        cuda: module ``pycuda.driver``.
        model: what the engines were built from.
        plans: a serialised engine for each segment.
        cubin: the compiled preprocess kernel; None: preprocess on the CPU.
        dla_core: deep learning accelerator that the engines were built for; -1: the GPU.

    Attributes:
        sets: the two sets of buffers.
        preprocess_on_gpu: whether preprocess ends with an event.
        mapped: whether host and device share memory.
        graphs: how CUDA graphs are used, or why not.

    Raises:
        UnavailableError: no GPU or no driver, or TensorRT is too old.
        BackendError: an engine is refused or does not fit the model, a segment fails, or the
            memory does not suffice.
    """

    def __init__(
        self,
        trt: Any,
        cuda: Any,
        model: Model,
        plans: list[bytes],
        cubin: bytes | None = None,
        dla_core: int = -1,
    ) -> None:
        _check_version(trt)
        if len(plans) != len(model.segments):
            raise BackendError(
                f"{len(plans)} engines for a model of {len(model.segments)} segments: {_REBUILD}"
            )
        self._trt = trt
        self._cuda = cuda
        self._spec: InputSpec = model.input
        self._input_name = model.input.tensor.name
        self._contexts: list[Any] = []
        self._bound: list[BufferSet | None] = []
        self._finite: list[NDArray[np.bool_]] = []
        self._runtime: Any = None
        self._stream: Any = None
        self._handle = 0
        self._module: Any = None
        self._kernel: Any = None
        self._recorder: Recorder | None = None
        self._preprocessor = Preprocessor(model)
        self.preprocess_on_gpu = cubin is not None
        self.sets = (BufferSet(), BufferSet())
        self.graphs = "no CUDA graphs"
        try:
            cuda.init()
            device = cuda.Device(0)
            self._name = device.name()
            self._sm = "{}.{}".format(*device.compute_capability())
            self.mapped = bool(device.get_attribute(cuda.device_attribute.INTEGRATED))
            self._context: Any = device.retain_primary_context()
            self._context.push()
        except cuda.Error as error:
            raise UnavailableError(f"the GPU cannot be used ({error}): check nvidia-smi") from None
        failure: BaseException | None = None
        try:
            self._load(model, plans, cubin, dla_core)
            self._warm_up()
        except BaseException as error:  # noqa: BLE001 (raised below)
            failure = self._failure(error)
        if failure is not None:
            self.close()
            raise failure

    def describe(self) -> str:
        """One line: versions, device, and which of several ways is used."""
        memory = "mapped host memory" if self.mapped else "pinned host memory, copied"
        preprocess = "on the GPU" if self.preprocess_on_gpu else "on the CPU"
        return (
            f"TensorRT {self._trt.__version__} on {self._name} (SM {self._sm}), {memory}, "
            f"{self.graphs}, preprocess {preprocess}"
        )

    # A frame. Nothing below waits for the device or allocates, but for a larger image.

    def preprocess(self, buffers: BufferSet, image: NDArray[np.uint8]) -> Letterbox:
        """Fill the input tensor, or queue what fills it; ``image`` is not needed any more then."""
        if self.preprocess_on_gpu:
            return self._preprocess_on_gpu(buffers, image)
        assert buffers.input is not None
        letterbox = self._preprocessor.run(image, buffers.input)
        if buffers.input_device is not None:
            self._cuda.memcpy_htod_async(buffers.input_device, buffers.input, self._stream)
        return letterbox

    def enqueue(self, buffers: BufferSet, k: int) -> None:
        """Queue segment ``k``, the copy of its head to the host, and its event.

        Raises:
            BackendError: TensorRT or the driver refused.
        """
        if buffers.graphs:
            buffers.graphs[k].launch()
        else:
            self._enqueue_plain(buffers, k, self._handle)
        device = buffers.head_devices[k]
        if device is not None:
            self._cuda.memcpy_dtoh_async(buffers.heads[k], device, self._stream)
        buffers.events[k + 1].record(self._stream)

    def check_finite(self, buffers: BufferSet, k: int) -> None:
        """Refuse NaN and infinity in exit ``k`` (46 us at 3549 x 84).

        Raises:
            BackendError: there is one.
        """
        finite = self._finite[k]
        np.isfinite(buffers.heads[k], out=finite)
        if not finite.all():
            raise BackendError("NaN or infinity in the detection tensor")

    def alive(self) -> bool:
        """False after an error that the context keeps: then every call fails."""
        try:
            self._stream.is_done()
        except self._cuda.Error:
            return False
        return True

    def close(self) -> None:
        """Wait for what is queued, free everything, pop the context. Never raises."""
        current, self._context = self._context, None
        if current is None:
            return
        try:
            if self._stream is not None:
                with contextlib.suppress(self._cuda.Error):
                    self._stream.synchronize()
            self._drop_graphs()
            self.sets = (BufferSet(), BufferSet())
            self._bound.clear()
            self._contexts.clear()
            self._runtime = self._kernel = self._module = self._stream = None
        finally:
            # A context that keeps an error may refuse to be popped. A thread that ends with one
            # pushed aborts the process, but detaching drops it from pycuda's stack as well.
            with contextlib.suppress(self._cuda.Error):
                current.pop()
            with contextlib.suppress(self._cuda.Error):
                current.detach()

    def _enqueue_plain(self, buffers: BufferSet, k: int, handle: int) -> None:
        context = self._contexts[k]
        if self._bound[k] is not buffers:
            self._bound[k] = None  # until all are set: one that is refused leaves a mixture
            for name, address in buffers.addresses[k]:
                if not context.set_tensor_address(name, address):
                    raise BackendError(f"TensorRT refused the address of tensor '{name}'")
            self._bound[k] = buffers
        if not context.execute_async_v3(handle):
            raise BackendError("TensorRT refused to enqueue it, see its message on standard error")

    def _preprocess_on_gpu(self, buffers: BufferSet, image: NDArray[np.uint8]) -> Letterbox:
        height, width, _ = image.shape
        size = height * width * 3
        staging = buffers.staging
        if staging is None or staging.size < size:
            staging = self._grow_staging(buffers, size)
        pixels = staging[:size]
        np.copyto(pixels.reshape(height, width, 3), image)
        if buffers.staging_device is not None:
            self._cuda.memcpy_htod_async(buffers.staging_device, pixels, self._stream)
        layout = ImageLayout(PixelFormat.BGR8, width, height, width * 3)
        call = launch(layout, self._spec, buffers.staging_address, buffers.input_address)
        block = KERNELS["float32"].block
        self._kernel.prepared_async_call(call.grid, block, self._stream, *call.args)
        buffers.events[PREPROCESS + 1].record(self._stream)
        return call.letterbox

    def _grow_staging(self, buffers: BufferSet, size: int) -> NDArray[np.uint8]:
        """For the first frame, and when frames become larger."""
        buffers.staging_device = None
        staging, buffers.staging_device, buffers.staging_address = self._host((size,), np.uint8)
        buffers.staging = staging
        return staging

    # Loading.

    def _failure(self, error: BaseException) -> BaseException:
        """The error without traceback and cause: their frames would keep memory alive longer than
        the context, or take it to another thread.
        """
        if isinstance(error, self._cuda.MemoryError):
            return BackendError(
                "the GPU has too little free memory for the engines: end what else uses it"
            )
        if isinstance(error, self._cuda.Error):
            return BackendError(f"CUDA: {str(error).strip()}")
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)

    def _load(self, model: Model, plans: list[bytes], cubin: bytes | None, dla_core: int) -> None:
        trt, cuda = self._trt, self._cuda
        self._stream = cuda.Stream(_NON_BLOCKING)
        self._handle = self._stream.handle
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        if dla_core >= 0:
            self._runtime.DLA_core = dla_core
        for segment, plan in zip(model.segments, plans):
            engine = self._engine(segment.index, plan)
            self._check_tensors(segment, engine)
            context = engine.create_execution_context()
            if context is None:
                raise BackendError(
                    f"segment {segment.index}: TensorRT made no execution context, see its "
                    "message on standard error: the GPU may have too little free memory"
                )
            self._contexts.append(context)
            self._bound.append(None)
            self._finite.append(np.zeros(segment.output.shape, np.bool_))
        if cubin is not None:
            spec = KERNELS["float32"]
            self._module = cuda.module_from_buffer(cubin)
            self._kernel = self._module.get_function(spec.entry).prepare(spec.arg_format)
        for buffers in self.sets:
            self._allocate(buffers, model)

    def _engine(self, k: int, plan: bytes) -> Any:
        try:
            engine = self._runtime.deserialize_cuda_engine(plan)
        except Exception as error:  # noqa: BLE001 (whatever a damaged file does to it)
            reason = str(error).strip().split("\n", 1)[0]
        else:
            if engine is not None:
                return engine
            reason = "see its message on standard error"
        raise BackendError(
            f"segment {k}: TensorRT {self._trt.__version__} refused the engine ({reason}): it is "
            f"damaged or was built for another GPU or version: {_REBUILD}"
        )

    def _check_tensors(self, segment: SegmentSpec, engine: Any) -> None:
        mode = self._trt.TensorIOMode
        found: dict[str, str] = {}
        for i in range(engine.num_io_tensors):
            name = engine.get_tensor_name(i)
            kind = "input" if engine.get_tensor_mode(name) == mode.INPUT else "output"
            dtype = np.dtype(self._trt.nptype(engine.get_tensor_dtype(name))).name
            found[name] = f"{kind} {dtype} {list(engine.get_tensor_shape(name))}"
        want = {t.name: f"input {t.dtype} {list(t.shape)}" for t in segment.inputs}
        for tensor in (segment.output, *segment.features):
            want[tensor.name] = f"output {tensor.dtype} {list(tensor.shape)}"
        for name in sorted(found.keys() | want.keys()):
            if found.get(name) != want.get(name):
                raise BackendError(
                    f"segment {segment.index}: tensor '{name}': the model has "
                    f"{want.get(name, 'none')}, the engine {found.get(name, 'none')}: {_REBUILD}"
                )

    def _allocate(self, buffers: BufferSet, model: Model) -> None:
        cuda = self._cuda
        shape = self._spec.tensor.shape
        if self.preprocess_on_gpu:
            buffers.input_device = cuda.mem_alloc(4 * int(np.prod(shape)))
            buffers.input_address = int(buffers.input_device)
        else:
            array, buffers.input_device, buffers.input_address = self._host(shape, np.float32)
            buffers.input = array
        known = {self._input_name: buffers.input_address}
        for segment in model.segments:
            for feature in segment.features:
                memory = cuda.mem_alloc(4 * int(np.prod(feature.shape)))
                buffers.features.append(memory)
                known[feature.name] = int(memory)
            head, device, address = self._host(segment.output.shape, np.float32)
            buffers.heads.append(head)
            buffers.head_devices.append(device)
            buffers.views.append(head[0])
            names = [tensor.name for tensor in (*segment.inputs, *segment.features)]
            bound = [(name, known[name]) for name in names]
            buffers.addresses.append([*bound, (segment.output.name, address)])
        flags = cuda.event_flags.DISABLE_TIMING
        buffers.events += [cuda.Event(flags) for _ in range(len(model.segments) + 1)]

    def _host(self, shape: tuple[int, ...], dtype: type) -> tuple[NDArray[Any], Any, int]:
        """Host memory that the device reads and writes: the array, the device memory beside it
        (None where it is mapped), and the address that the device uses.
        """
        cuda = self._cuda
        if self.mapped:
            array = cuda.pagelocked_empty(shape, dtype, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
            array.fill(0)
            return array, None, int(array.base.get_device_pointer())
        array = cuda.pagelocked_empty(shape, dtype)
        array.fill(0)
        device = cuda.mem_alloc(array.nbytes)
        return array, device, int(device)

    def _warm_up(self) -> None:
        """Run every segment once on a black input in each set, then capture it where possible."""
        try:
            self._recorder = Recorder(load_bindings())
        except PerceptionRtError as error:
            self.graphs = f"no CUDA graphs, usual stream priority: {error}"
        for buffers in self.sets:
            if buffers.input_device is not None:
                size = 4 * int(np.prod(self._spec.tensor.shape))
                self._cuda.memset_d8_async(buffers.input_device, 0, size, self._stream)
            for k in range(len(self._contexts)):
                try:
                    self._enqueue_plain(buffers, k, self._handle)
                    self._stream.synchronize()
                except (BackendError, self._cuda.Error) as error:
                    raise BackendError(f"first run: {fault_text(k, error)}") from None
        if self._recorder is not None:
            self._capture(self._recorder)

    def _capture(self, recorder: Recorder) -> None:
        k = 0
        try:
            for buffers in self.sets:
                for k in range(len(self._contexts)):
                    graph = recorder.capture(
                        lambda handle, b=buffers, k=k: self._enqueue_plain(b, k, handle),  # type: ignore[misc]
                        self._handle,
                    )
                    buffers.graphs.append(graph)
        except Exception as error:  # noqa: BLE001 (of any kind: it works without graphs)
            self._drop_graphs()
            self.graphs = f"no CUDA graphs, usual stream priority: {fault_text(k, error)}"
        else:
            self.graphs = f"CUDA graphs of priority {recorder.priority}"

    def _drop_graphs(self) -> None:
        for buffers in self.sets:
            while buffers.graphs:
                buffers.graphs.pop().close()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


def _check_version(trt: Any) -> None:
    numbers = tuple(int(part) for part in str(trt.__version__).split(".")[:2])
    if numbers < OLDEST_TENSORRT:
        oldest = ".".join(map(str, OLDEST_TENSORRT))
        raise UnavailableError(
            f"TensorRT {trt.__version__} is too old, {oldest} or newer is needed: update JetPack "
            "or the tensorrt package, or use the onnxruntime backend"
        )
