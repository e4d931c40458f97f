"""Who is warmed up, chosen, kept and closed."""

from __future__ import annotations

from typing import cast

import pytest
from support.manual_backend import ManualBackend

from perception_rt.core.clock import NS_PER_MS, ManualClock
from perception_rt.core.errors import BackendError
from perception_rt.detector.model import Model
from perception_rt.detector.select import Candidate, Candidates, LoadOptions
from perception_rt.detector.switching_backend import SwitchingBackend
from perception_rt.runtime.selection import select

MS = NS_PER_MS
OPTIONS: LoadOptions = LoadOptions(model=cast(Model, None))  # nothing is loaded here


def candidate(name):
    return Candidate(name, ManualBackend(ManualClock(0), name=name))


def warm_up(p99_ms):
    """A warm-up that finds these p99; None: it fails."""

    def run(backend, model):
        assert model.segments == 3
        found = p99_ms[backend.name]
        if found is None:
            raise BackendError("warm-up: segment 0 did not return within 30 s")
        return found * MS

    return run


def closed(candidates):
    return [c.name for c in candidates.all() if c.backend.closed]


def test_auto_takes_the_fastest_first_exit_and_says_why():
    gpu, cpu = candidate("tensorrt"), candidate("onnxruntime")
    gpu.backend.describe = lambda: "TensorRT 10.3.0 on Orin"
    candidates = Candidates([gpu, cpu], cpu, ["onnxruntime-cuda: no such provider"])
    selected = select("auto", candidates, OPTIONS, warm_up({"tensorrt": 3, "onnxruntime": 25}))
    assert isinstance(selected.backend, SwitchingBackend)
    assert selected.primary is gpu.backend
    assert selected.fallback is not None
    assert selected.fallback[0] is cpu.backend
    assert selected.first_exit_p99_ns == 3 * MS
    assert closed(candidates) == []
    assert selected.report == {
        "primary": "tensorrt",
        "fallback": "onnxruntime",
        "reason": "tensorrt (the fastest that runs here); fallback onnxruntime; first exit p99 at "
        "warm-up: tensorrt 3.0 ms, onnxruntime 25.0 ms; not usable: onnxruntime-cuda: no such "
        "provider",
        "detail": "TensorRT 10.3.0 on Orin",
    }


def test_a_gpu_that_is_slower_than_the_cpu_is_not_used():
    gpu, cpu = candidate("tensorrt"), candidate("onnxruntime")
    candidates = Candidates([gpu, cpu], cpu, [])
    selected = select("auto", candidates, OPTIONS, warm_up({"tensorrt": 30, "onnxruntime": 25}))
    assert selected.backend is cpu.backend
    assert selected.fallback is None
    assert closed(candidates) == ["tensorrt"]
    assert (selected.report["fallback"], selected.report["detail"]) == ("", "")


def test_of_equals_the_first_is_taken_and_the_middle_one_closed():
    names = ("tensorrt", "onnxruntime-cuda", "onnxruntime")
    all_three = [candidate(name) for name in names]
    candidates = Candidates(all_three, all_three[2], [])
    selected = select("auto", candidates, OPTIONS, warm_up(dict.fromkeys(names, 5)))
    assert selected.report["primary"] == "tensorrt"
    assert closed(candidates) == ["onnxruntime-cuda"]


def test_a_candidate_of_auto_that_fails_in_warm_up_is_left_out():
    gpu, cpu = candidate("tensorrt"), candidate("onnxruntime")
    gpu.backend.stops = False
    candidates = Candidates([gpu, cpu], cpu, [])
    selected = select("auto", candidates, OPTIONS, warm_up({"tensorrt": None, "onnxruntime": 25}))
    assert selected.backend is cpu.backend
    assert selected.left_behind
    assert selected.report["reason"].endswith(
        "not usable: tensorrt: warm-up: segment 0 did not return within 30 s"
    )


def test_a_fallback_of_auto_that_fails_in_warm_up_is_none():
    gpu, cpu = candidate("tensorrt"), candidate("onnxruntime")
    candidates = Candidates([gpu, cpu], cpu, [])
    selected = select("auto", candidates, OPTIONS, warm_up({"tensorrt": 3, "onnxruntime": None}))
    assert selected.backend is gpu.backend
    assert selected.report["fallback"] == ""
    assert closed(candidates) == ["onnxruntime"]


@pytest.mark.parametrize(("asked", "names"), [("auto", ["onnxruntime"]), ("a:B", ["a:B"])])
def test_the_last_one_that_fails_is_an_error(asked, names):
    candidates = Candidates([candidate(name) for name in names], None, [])
    with pytest.raises(BackendError, match="did not return"):
        select(asked, candidates, OPTIONS, warm_up(dict.fromkeys(names)))


def test_what_was_asked_for_by_name_runs_however_slow():
    gpu, cpu = candidate("onnxruntime-cuda"), candidate("onnxruntime")
    candidates = Candidates([gpu], cpu, [])
    warm = warm_up({"onnxruntime-cuda": 40, "onnxruntime": 25})
    selected = select("onnxruntime-cuda", candidates, OPTIONS, warm)
    assert selected.primary is gpu.backend
    assert selected.first_exit_p99_ns == 40 * MS
    assert selected.report["reason"] == (
        "onnxruntime-cuda (as configured); fallback onnxruntime; first exit p99 at warm-up: "
        "onnxruntime-cuda 40.0 ms, onnxruntime 25.0 ms"
    )
