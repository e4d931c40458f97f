from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from support.backends import OPTIONS_VARIABLE, FaultyBackend, HangingBackend, ScriptedBackend
from support.manual_backend import ManualBackend

from perception_rt.core.clock import NS_PER_MS, NS_PER_S, ManualClock
from perception_rt.core.errors import (
    BackendError,
    PerceptionRtError,
    UnavailableError,
    UsageError,
)
from perception_rt.detector import select
from perception_rt.detector.backend import Backend
from perception_rt.detector.model import Model
from perception_rt.detector.onnx_backend import OnnxBackend
from perception_rt.detector.select import LoadOptions, load_backend, load_candidates

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
    backend = load_backend(name, LoadOptions(tiny, thread_init=init))
    with closing(backend):
        assert type(backend) is kind
        assert seen == ["inference"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("auto", "onnxruntime, or 'module:Class'"),
        ("", "onnxruntime, or 'module:Class'"),
        ("tensorflow", "onnxruntime, or 'module:Class'"),
        (":X", "onnxruntime, or 'module:Class'"),
        ("support.backends:", "onnxruntime, or 'module:Class'"),
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
        ("threading:Timer", "is no backend: it lacks exit_count, "),
    ],
)
def test_a_name_of_nothing_is_refused(tiny: Model, name: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_backend(name, LoadOptions(tiny))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert f"'{name}'" in str(caught.value)
    assert isinstance(caught.value, PerceptionRtError)


def test_onnx_runtime_is_imported_only_when_chosen(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "perception_rt.detector.onnx_backend")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with closing(load_backend("support.backends:ScriptedBackend", LoadOptions(tiny))) as backend:
        run_frame(backend)
    with pytest.raises(UnavailableError, match="install onnxruntime"):
        load_backend("onnxruntime", LoadOptions(tiny))


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


class _Watched(ManualBackend):
    """Says when it is closed."""

    def __init__(self, closed: list[str], name: str) -> None:
        super().__init__(ManualClock(0), name=name)
        self.log = closed

    def close(self, timeout_s: float = 1.0) -> bool:
        self.log.append(str(self.name))
        return True


class Loads:
    """Stands in for ``load_backend``: loads these names, says what was loaded with what."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.loaded: list[tuple[str, object]] = []
        self.closed: list[str] = []

    def __call__(self, name: str, options: LoadOptions) -> Backend:
        if name not in self.names:
            raise UnavailableError(f"no {name} here")
        self.loaded.append((name, options.thread_init))
        return _Watched(self.closed, name)


def first() -> None:
    """thread_init of a primary."""


def behind() -> None:
    """thread_init of a fallback."""


ALL = ("tensorrt", "onnxruntime-tensorrt", "onnxruntime-cuda", "onnxruntime", "a:B", "c:D")


@pytest.mark.parametrize(
    ("backend", "fallback", "names", "primaries", "spare"),
    [
        ("auto", "auto", ALL, ["tensorrt", "onnxruntime-cuda", "onnxruntime"], "onnxruntime"),
        ("auto", "auto", ("onnxruntime",), ["onnxruntime"], "onnxruntime"),
        ("auto", "auto", ("tensorrt",), ["tensorrt"], None),
        ("auto", "none", ALL, ["tensorrt", "onnxruntime-cuda", "onnxruntime"], None),
        ("auto", "a:B", ("onnxruntime", "a:B"), ["onnxruntime"], "a:B"),
        ("tensorrt", "auto", ALL, ["tensorrt"], "onnxruntime"),
        ("onnxruntime-tensorrt", "auto", ALL, ["onnxruntime-tensorrt"], "onnxruntime"),
        ("onnxruntime-cuda", "none", ALL, ["onnxruntime-cuda"], None),
        ("onnxruntime", "auto", ALL, ["onnxruntime"], None),
        ("a:B", "auto", ALL, ["a:B"], None),
        ("a:B", "c:D", ALL, ["a:B"], "c:D"),
    ],
)
def test_what_is_loaded(
    tiny: Model,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    fallback: str,
    names: tuple[str, ...],
    primaries: list[str],
    spare: str | None,
) -> None:
    loads = Loads(*names)
    monkeypatch.setattr(select, "load_backend", loads)
    options = LoadOptions(tiny, thread_init=first, standby_init=behind)
    found = load_candidates(backend, fallback, options)
    assert [one.name for one in found.primaries] == primaries
    assert (found.fallback.name if found.fallback else None) == spare
    # each is loaded once, and only what stands behind another has a fallback's rights
    assert [name for name, _ in loads.loaded] == [one.name for one in found.all()]
    rights = dict(loads.loaded)
    assert rights[primaries[0]] is first
    if spare is not None and spare != primaries[0]:
        assert rights[spare] is behind
    tried = {"tensorrt", "onnxruntime-cuda", "onnxruntime"} if backend == "auto" else set()
    assert found.refused == [
        f"{name}: no {name} here"
        for name in ("tensorrt", "onnxruntime-cuda", "onnxruntime")
        if name in tried - set(names)
    ]


@pytest.mark.parametrize(
    ("backend", "fallback", "names", "words", "closed"),
    [
        ("auto", "auto", (), "no onnxruntime here", []),
        ("tensorrt", "auto", ("onnxruntime",), "no tensorrt here", []),
        ("a:B", "c:D", ("a:B",), "no c:D here", ["a:B"]),
        ("auto", "c:D", ("onnxruntime",), "no c:D here", ["onnxruntime"]),
    ],
)
def test_what_was_asked_for_and_does_not_load_is_an_error(
    tiny: Model,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    fallback: str,
    names: tuple[str, ...],
    words: str,
    closed: list[str],
) -> None:
    loads = Loads(*names)
    monkeypatch.setattr(select, "load_backend", loads)
    with pytest.raises(UnavailableError, match=words):
        load_candidates(backend, fallback, LoadOptions(tiny))
    assert loads.closed == closed


def test_a_fallback_that_is_the_backend_itself_is_refused(tiny: Model) -> None:
    with pytest.raises(UsageError, match="'onnxruntime' is the backend itself: use 'none'"):
        load_candidates("onnxruntime", "onnxruntime", LoadOptions(tiny))


@pytest.mark.parametrize(
    ("name", "provider"),
    [
        ("onnxruntime-cuda", "CUDAExecutionProvider"),
        ("onnxruntime-tensorrt", "TensorrtExecutionProvider"),
    ],
)
def test_a_provider_that_the_wheel_lacks_is_refused_with_the_remedy(
    tiny: Model, name: str, provider: str
) -> None:
    import onnxruntime

    if provider in onnxruntime.get_available_providers():
        pytest.skip(f"this ONNX Runtime has {provider}")
    with pytest.raises(UnavailableError) as caught:
        load_backend(name, LoadOptions(tiny))
    assert f"has no {provider}, only " in str(caught.value)
    assert "CPUExecutionProvider" in str(caught.value)
    assert "install onnxruntime-gpu in its place" in str(caught.value)


def test_auto_on_this_machine_has_a_reason_for_what_it_leaves_out(tiny: Model) -> None:
    found = load_candidates("auto", "auto", LoadOptions(tiny))
    names = [one.name for one in found.primaries]
    for one in found.all():
        assert one.backend.close()
    assert names[-1] == "onnxruntime"
    refused = {line.partition(": ")[0]: line.partition(": ")[2] for line in found.refused}
    assert sorted([*names, *refused]) == ["onnxruntime", "onnxruntime-cuda", "tensorrt"]
    assert all(len(reason) > 20 for reason in refused.values())
