from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from support.backends import OPTIONS_VARIABLE, FaultyBackend, HangingBackend, ScriptedBackend

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.errors import (
    BackendError,
    PerceptionRtError,
    UnavailableError,
    UsageError,
)
from perception_rt.detector.backend import Backend
from perception_rt.detector.model import Model
from perception_rt.detector.onnx_backend import OnnxBackend
from perception_rt.detector.select import load_backend

IMAGE = np.zeros((32, 32, 3), np.uint8)


def run_frame(backend: Backend) -> None:
    backend.begin(IMAGE)
    for k in range(3):
        backend.launch(k)
    while not backend.ready(2):
        assert backend.wait_until(time.monotonic_ns() + 60 * NS_PER_S)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("onnxruntime", OnnxBackend),
        ("support.backends:HangingBackend", HangingBackend),
        ("support.backends:ScriptedBackend", ScriptedBackend),
        ("support.backends:FaultyBackend", FaultyBackend),
    ],
)
def test_a_name_gives_its_backend(tiny: Model, name: str, kind: type) -> None:
    seen: list[str] = []
    init: Callable[[], None] = lambda: seen.append(threading.current_thread().name)  # noqa: E731
    backend = load_backend(name, tiny, 1, init)
    with closing(backend):
        assert type(backend) is kind
        assert seen == ["inference"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("", "use 'onnxruntime' or 'module:Class'"),
        ("tensorflow", "use 'onnxruntime' or 'module:Class'"),
        (":X", "use 'onnxruntime' or 'module:Class'"),
        ("support.backends:", "use 'onnxruntime' or 'module:Class'"),
        ("no.such.module:X", "cannot be imported"),
        ("support.backends:NoSuch", "cannot be imported"),
        (".relative:X", "cannot be imported"),
        ("os:path", "is a module, not a class"),
        ("os:sep", "is a str, not a class"),
        ("threading:get_ident", "does not take (model, intra_op_threads, thread_init)"),
        ("threading:Event", "does not take (model, intra_op_threads, thread_init)"),
        ("statistics:NormalDist.x", "cannot be imported"),
        ("builtins:open", "cannot be constructed: TypeError"),
        ("types:SimpleNamespace", "'types:SimpleNamespace'"),
        ("threading:Timer", "is no backend: it lacks exit_count, progress, begin, launch"),
    ],
)
def test_a_name_of_nothing_is_refused(tiny: Model, name: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_backend(name, tiny)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert f"'{name}'" in str(caught.value)
    assert isinstance(caught.value, PerceptionRtError)


def test_onnx_runtime_is_imported_only_when_chosen(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "perception_rt.detector.onnx_backend")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with closing(load_backend("support.backends:ScriptedBackend", tiny)) as backend:
        run_frame(backend)
    with pytest.raises(UnavailableError, match="install onnxruntime"):
        load_backend("onnxruntime", tiny)


def test_the_hanging_double_hangs_where_told(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, '{"segment": 1, "frame": 2}')
    backend = HangingBackend(tiny)
    run_frame(backend)
    backend.begin(IMAGE)
    backend.launch(0)
    backend.launch(1)
    while not backend.ready(0):
        assert backend.wait_until(time.monotonic_ns() + 60 * NS_PER_S)
    assert not backend.wait_until(time.monotonic_ns() + NS_PER_MS)
    assert not backend.drain(time.monotonic_ns())
    assert backend.detections(0)[0, 4] == np.float32(0.9)
    assert not backend.close(0.001)


def test_the_scripted_double_keeps_to_its_script(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, '{"frame": 2, "durations_ms": [[2, 4, 6], [6, 0, 2]]}')
    with closing(ScriptedBackend(tiny)) as backend:
        for least_ms in ((1, 1, 1), (2, 4, 6), (6, 0, 2), (2, 4, 6)):
            run_frame(backend)
            for k in range(3):
                start_ns, end_ns = backend.span_ns(k)
                assert end_ns - start_ns >= least_ms[k] * NS_PER_MS


def test_the_faulty_double_fails_where_told(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, '{"segment": 1, "raise_frames": [2], "nan_frames": [4]}')
    with closing(FaultyBackend(tiny)) as backend:
        results = []
        for _ in range(5):
            try:
                run_frame(backend)
                results.append("fine")
            except BackendError as error:
                results.append(str(error))
            assert backend.drain(time.monotonic_ns() + 60 * NS_PER_S)
    assert results == [
        "fine",
        "segment 1 failed: RuntimeError: scripted fault of frame 2",
        "fine",
        "segment 1 failed: NaN or infinity in the detection tensor",
        "fine",
    ]
