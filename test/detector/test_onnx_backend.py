from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from support.tiny_model import expected_detections, write_tiny_model

from perception_rt.core.clock import NS_PER_S, ManualClock
from perception_rt.core.config import GpuOptions
from perception_rt.core.errors import BackendError, ModelError, UnavailableError, UsageError
from perception_rt.detector.backend import PREPROCESS, Backend
from perception_rt.detector.model import Model, load_model
from perception_rt.detector.onnx_backend import CPU, CUDA, TENSORRT, OnnxBackend
from perception_rt.detector.postprocess import Detections, Postprocessor
from perception_rt.detector.preprocess import Preprocessor


def run_frame(backend: Backend, image: NDArray[np.uint8], depth: int = 3) -> None:
    backend.begin(image)
    for k in range(depth):
        backend.launch(k)
    while not backend.ready(depth - 1):
        assert backend.wait_until(time.monotonic_ns() + 60 * NS_PER_S)


def grey(value: int) -> NDArray[np.uint8]:
    return np.full((32, 32, 3), value, np.uint8)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_exit_answers_for_the_frame_at_hand(tiny: Model, threads: int) -> None:
    backend: Backend = OnnxBackend(tiny, threads)
    with closing(backend):
        assert backend.exit_count == 3
        for value in (0, 51, 255, 51, 102):
            run_frame(backend, grey(value))
            for k in range(3):
                np.testing.assert_allclose(
                    backend.detections(k), expected_detections(k, value / 255), atol=1e-5
                )


def test_a_shallow_frame_after_a_deep_one_shows_nothing_of_it(tiny: Model) -> None:
    with closing(OnnxBackend(tiny)) as backend:
        run_frame(backend, grey(255))
        run_frame(backend, grey(0), depth=1)
        np.testing.assert_allclose(backend.detections(0), expected_detections(0, 0), atol=1e-6)
        for k in (1, 2):
            assert not backend.ready(k)
            with pytest.raises(BackendError, match=f"exit {k} has no answer"):
                backend.detections(k)


def test_an_exit_stays_valid_until_its_segment_is_launched_again(tiny: Model) -> None:
    with closing(OnnxBackend(tiny)) as backend:
        run_frame(backend, grey(255), depth=2)
        view = backend.detections(1)
        run_frame(backend, grey(0), depth=1)
        np.testing.assert_allclose(view, expected_detections(1, 1), atol=1e-5)


def test_a_failed_run_is_a_fault_of_its_frame_only(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path / "m", fails_when_bright=True))
    with closing(OnnxBackend(model)) as backend:
        run_frame(backend, grey(10))
        with pytest.raises(BackendError) as caught:
            run_frame(backend, grey(250))
        assert str(caught.value).startswith("segment 1 failed: ")
        assert "\n" not in str(caught.value)
        assert backend.drain(time.monotonic_ns() + 60 * NS_PER_S)
        np.testing.assert_allclose(
            backend.detections(0), expected_detections(0, 250 / 255), atol=1e-5
        )
        run_frame(backend, grey(20))
        np.testing.assert_allclose(
            backend.detections(2), expected_detections(2, 20 / 255), atol=1e-5
        )


def test_spans_are_stamped_by_the_given_clock(tiny: Model) -> None:
    clock = ManualClock(1_000)
    backend = OnnxBackend(tiny, clock=clock)
    with closing(backend):
        backend.begin(grey(1))
        while not backend.ready(PREPROCESS):
            backend.wait_until(clock.now() + NS_PER_S)
        clock.advance(500)
        backend.launch(0)
        while not backend.ready(0):
            backend.wait_until(clock.now() + NS_PER_S)
        assert backend.span_ns(PREPROCESS) == (1_000, 1_000)
        assert backend.span_ns(0) == (1_500, 1_500)
        assert backend.span_ns(1) == (0, 0)


def resign(directory: Path, k: int, data: bytes) -> None:
    """Put other bytes in place of a segment, and make the manifest agree to them."""
    (directory / f"segment_{k}.onnx").write_bytes(data)
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["segments"][k]["sha256"] = hashlib.sha256(data).hexdigest()
    manifest["segments"][k]["size_bytes"] = len(data)
    path.write_text(json.dumps(manifest), encoding="utf-8")


def rename_input(model: Any) -> None:
    model.graph.input[0].name = "other"
    for node in model.graph.node:
        node.input[:] = ["other" if name == "f0" else name for name in node.input]


def rename_output(model: Any) -> None:
    model.graph.node[-1].output[0] = "boxes"
    model.graph.output[-1].name = "boxes"


def half_output(model: Any) -> None:
    model.graph.node[-1].op_type = "Cast"
    model.graph.node[-1].attribute.append(onnx.helper.make_attribute("to", 10))
    model.graph.output[-1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def open_input(model: Any) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"


def extra_output(model: Any) -> None:
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("moved", onnx.TensorProto.FLOAT, [1, 20, 7])
    )


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (rename_input, ("input 'f0'", "expected tensor(float) [1, 3, 4, 4]", "found none")),
        (rename_output, ("output 'boxes'", "expected none", "found tensor(float)")),
        (half_output, ("output 'detections'", "found tensor(float16) [1, 20, 7]")),
        (open_input, ("input 'f0'", "found tensor(float) ['batch', 3, 4, 4]")),
        (extra_output, ("output 'moved'", "expected none")),
    ],
)
def test_a_file_that_differs_from_the_manifest_is_refused(
    tiny_dir: Path, edit: Any, parts: tuple[str, ...]
) -> None:
    proto = onnx.load(str(tiny_dir / "segment_1.onnx"))
    edit(proto)
    resign(tiny_dir, 1, proto.SerializeToString())
    model = load_model(tiny_dir)
    threads = threading.active_count()
    with pytest.raises(ModelError) as caught:
        OnnxBackend(model)
    assert str(tiny_dir / "segment_1.onnx") in str(caught.value)
    for part in (*parts, "export the model again"):
        assert part in str(caught.value)
    assert threading.active_count() == threads


@pytest.mark.parametrize("data", [b"not a network", b"\x08\x08", bytes(1000)])
def test_a_file_that_is_no_network_is_refused(tiny_dir: Path, data: bytes) -> None:
    resign(tiny_dir, 2, data)
    with pytest.raises(ModelError) as caught:
        OnnxBackend(load_model(tiny_dir))
    assert str(tiny_dir / "segment_2.onnx") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_exchanged_after_the_check_is_not_loaded(tiny_dir: Path) -> None:
    model = load_model(tiny_dir)
    (tiny_dir / "segment_2.onnx").write_bytes((tiny_dir / "segment_1.onnx").read_bytes())
    with pytest.raises(ModelError, match=r"segment_2\.onnx: expected"):
        OnnxBackend(model)


def test_many_backends_leave_no_thread_behind(tiny: Model) -> None:
    before = threading.active_count()
    for _ in range(20):
        backend = OnnxBackend(tiny)
        run_frame(backend, grey(3))
        assert backend.close(30)
    assert threading.active_count() == before


def plain_exits(model: Model, image: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
    """The exits by plain sessions without binding."""
    tensor = np.zeros(model.input.tensor.shape, np.float32)
    Preprocessor(model).run(image, tensor)
    values = {model.input.tensor.name: tensor}
    exits = []
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    for segment in model.segments:
        session = ort.InferenceSession(segment.read(), options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        feed = {spec.name: values[spec.name] for spec in segment.inputs}
        values.update(zip(names, session.run(names, feed), strict=True))
        exits.append(values[model.output_name][0])
    return exits


def test_the_real_model_runs_as_in_plain_sessions(nanodet: Model) -> None:
    image = np.random.default_rng(0).integers(0, 256, (360, 640, 3), np.uint8)
    with closing(OnnxBackend(nanodet)) as backend:
        run_frame(backend, grey(0))
        run_frame(backend, image)
        for k, expected in enumerate(plain_exits(nanodet, image)):
            np.testing.assert_array_equal(backend.detections(k), expected)


@pytest.mark.data
def test_the_deepest_exit_of_the_real_model_finds_pedestrians(
    nanodet: Model, shared_data: Path
) -> None:
    video = cv2.VideoCapture(str(shared_data / "video" / "vtest_pedestrians_768x576_10fps.avi"))
    found, image = video.read()
    video.release()
    assert found
    out = Detections(100)
    with closing(OnnxBackend(nanodet)) as backend:
        run_frame(backend, np.asarray(image, np.uint8))
        count = Postprocessor(nanodet, 100).run(
            backend.detections(2), backend.letterbox, 0.35, 0.6, 100, out
        )
    persons = [i for i in range(count) if nanodet.labels[out.class_ids[i]] == "person"]
    assert len(persons) >= 3
    height, width, _ = image.shape
    assert (out.boxes[:count, 2] <= width).all()
    assert (out.boxes[:count, 3] <= height).all()


class Wheel:
    """Stands in for an ONNX Runtime with GPU providers: sessions run on the CPU all the same."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, available: list[str], starts: bool
    ) -> None:
        self.asked: list[list[tuple[str, dict[str, Any]]]] = []
        real = ort.InferenceSession
        wheel = self

        class Session(real):  # type: ignore[misc,valid-type]
            def __init__(self, data: bytes, options: Any, providers: Any) -> None:
                wheel.asked.append(providers)
                super().__init__(data, options, providers=["CPUExecutionProvider"])

            def get_providers(self) -> list[str]:
                return [name for name, _ in wheel.asked[-1]] if starts else [CPU]

        monkeypatch.setattr(ort, "InferenceSession", Session)
        monkeypatch.setattr(ort, "get_available_providers", lambda: available)


def test_the_cuda_provider_is_asked_for_with_the_cpu_behind_it(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = Wheel(monkeypatch, [CUDA, CPU], starts=True)
    with closing(OnnxBackend(tiny, provider=CUDA)) as backend:
        run_frame(backend, grey(51))
        assert backend.detections(2) == pytest.approx(expected_detections(2, 0.2))
    assert wheel.asked == [[(CUDA, {}), (CPU, {})]] * 3


def test_the_tensorrt_provider_gets_precision_and_cache(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = Wheel(monkeypatch, [TENSORRT, CUDA, CPU], starts=True)
    gpu = GpuOptions(precision="fp16", engine_cache_dir="/somewhere")
    with closing(OnnxBackend(tiny, provider=TENSORRT, gpu=gpu)):
        pass
    options = {
        "trt_fp16_enable": True,
        "trt_int8_enable": False,
        "trt_engine_cache_enable": True,
        "trt_engine_cache_path": "/somewhere",
    }
    assert wheel.asked[0] == [(TENSORRT, options), (CUDA, {}), (CPU, {})]
    with closing(OnnxBackend(tiny, provider=TENSORRT)):
        pass
    plain = {"trt_fp16_enable": False, "trt_int8_enable": False}
    assert wheel.asked[-1] == [(TENSORRT, plain), (CUDA, {}), (CPU, {})]


def test_a_provider_that_does_not_start_is_refused_not_replaced_by_the_cpu(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    Wheel(monkeypatch, [CUDA, CPU], starts=False)
    with pytest.raises(UnavailableError, match="has CUDAExecutionProvider but could not start it"):
        OnnxBackend(tiny, provider=CUDA)


@pytest.mark.parametrize(
    ("provider", "gpu", "words"),
    [
        (CUDA, GpuOptions(precision="fp16"), "precision fp16 is not offered by CUDA"),
        (CUDA, GpuOptions(dla_core=0), "dla_core 0 is not offered"),
        (TENSORRT, GpuOptions(dla_core=1), "dla_core 1 is not offered"),
    ],
)
def test_an_option_that_a_provider_lacks_is_refused(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, provider: str, gpu: GpuOptions, words: str
) -> None:
    Wheel(monkeypatch, [TENSORRT, CUDA, CPU], starts=True)
    with pytest.raises(UsageError, match=words):
        OnnxBackend(tiny, provider=provider, gpu=gpu)
