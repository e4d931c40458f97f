"""What stands on /diagnostics."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed (scripts/setup.sh)")

from diagnostic_msgs.msg import DiagnosticStatus

from perception_rt.core.frame import Outcome
from perception_rt.ros.diagnostics import Diagnostics
from perception_rt.ros.worker_keeper import Phase
from perception_rt.runtime.shared_state import SharedState, SourceState, WorkerState

OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR
S = 1_000_000_000


class Process:
    def __init__(self) -> None:
        self.pid = 4711
        self.state = SharedState.create()


class Keeper:
    def __init__(self) -> None:
        self.process: Any = Process()
        self.phase = Phase.RUNNING
        self.restarts = 0
        self.last_end = ""


@pytest.fixture
def keeper():
    keeper = Keeper()
    state = keeper.process.state
    state.worker_state = WorkerState.ACTIVE
    state.session_id = 1
    state.budget_ns = 100_000_000
    state.heartbeat_ns = 10 * S - 5_000_000
    yield keeper
    if keeper.process is not None:
        keeper.process.state.close()


def report(
    diagnostics: Diagnostics, keeper: Any, now_ns: int = 10 * S, **other: Any
) -> dict[str, DiagnosticStatus]:
    options = {
        "lifecycle": "active",
        "hardware_id": "bag x",
        "incompatible": [],
        "given_up": "",
        **other,
    }
    statuses = diagnostics.statuses(now_ns, keeper=keeper, **options)
    assert {s.hardware_id for s in statuses} == {options["hardware_id"]}
    return {s.name: s for s in statuses}


def values(status: DiagnosticStatus) -> dict[str, str]:
    return {pair.key: pair.value for pair in status.values}


def test_names_follow_the_convention(keeper: Keeper) -> None:
    assert list(report(Diagnostics("/front/detector"), keeper)) == [
        "front/detector: worker",
        "front/detector: deadline",
        "front/detector: source",
        "front/detector: backend",
        "front/detector: realtime",
        "front/detector: qos",
    ]


def test_an_unconfigured_node_says_so_and_claims_nothing() -> None:
    statuses = report(Diagnostics("/detector"), None, lifecycle="unconfigured")
    assert list(statuses) == ["detector: worker", "detector: qos"]
    assert statuses["detector: worker"].level == OK
    assert statuses["detector: worker"].message == "no worker while unconfigured"


def test_given_up_is_an_error() -> None:
    worker = report(Diagnostics("/d"), None, given_up="signal 9")["d: worker"]
    assert (worker.level, worker.message) == (ERROR, "given up: signal 9")


def test_the_worker_s_state(keeper: Keeper) -> None:
    diagnostics = Diagnostics("/d")
    worker = report(diagnostics, keeper)["d: worker"]
    assert (worker.level, worker.message) == (OK, "running")
    assert values(worker)["pid"] == "4711"
    assert values(worker)["heartbeat_age_ms"] == "5.000"
    keeper.restarts, keeper.last_end = 2, "signal 11"
    worker = report(diagnostics, keeper)["d: worker"]
    assert (worker.level, worker.message) == (WARN, "restarted 2 times, last: signal 11")
    keeper.phase = Phase.WAITING
    worker = report(diagnostics, keeper)["d: worker"]
    assert (worker.level, worker.message) == (ERROR, "waiting to start again: signal 11")


def add(state: SharedState, **counts: int) -> None:
    for name, count in counts.items():
        for _ in range(count):
            state.add_outcome(Outcome[name])
        state.delivered_frames += count


def test_misses_are_those_since_the_last_report(keeper: Keeper) -> None:
    diagnostics, state = Diagnostics("/d"), keeper.process.state
    add(state, OK=5, LATE=5)
    first = report(diagnostics, keeper)["d: deadline"]
    assert (first.level, first.message) == (OK, "0 misses in the last 0 frames")
    add(state, OK=8, EARLY=1, LATE=1)
    second = report(diagnostics, keeper, 11 * S)
    assert second["d: deadline"].level == WARN
    assert second["d: deadline"].message == "1 misses in the last 10 frames"
    assert values(second["d: deadline"])["LATE"] == "6"
    assert values(second["d: deadline"])["deadline_ms"] == "100.000"
    assert values(second["d: source"])["rate_hz"] == "10.00"
    add(state, REPLACED=2)
    assert report(diagnostics, keeper, 12 * S)["d: deadline"].level == ERROR
    assert report(diagnostics, keeper, 13 * S)["d: deadline"].level == OK


def test_replaced_by_wish_is_no_miss(keeper: Keeper) -> None:
    diagnostics, state = Diagnostics("/d"), keeper.process.state
    state.frame_skip = 1
    report(diagnostics, keeper)
    add(state, REPLACED=3)
    assert report(diagnostics, keeper, 11 * S)["d: deadline"].level == OK


def test_a_new_worker_counts_from_zero_again(keeper: Keeper) -> None:
    diagnostics, state = Diagnostics("/d"), keeper.process.state
    add(state, OK=100)
    report(diagnostics, keeper)
    keeper.process.state.close()
    keeper.process = Process()
    fresh = keeper.process.state
    fresh.worker_state, fresh.session_id = WorkerState.ACTIVE, 2
    add(fresh, OK=3)
    status = report(diagnostics, keeper, 11 * S)
    assert status["d: deadline"].message == "0 misses in the last 0 frames"
    assert values(status["d: source"])["rate_hz"] == "0.00"


def test_two_reports_at_one_instant_do_not_divide_by_zero(keeper: Keeper) -> None:
    diagnostics = Diagnostics("/d")
    report(diagnostics, keeper)
    assert values(report(diagnostics, keeper)["d: source"])["rate_hz"] == "0.00"


@pytest.mark.parametrize(
    ("state", "level"),
    [(SourceState.OK, OK), (SourceState.LOST, ERROR), (SourceState.ENDED, WARN)],
)
def test_the_source_s_state(keeper: Keeper, state: SourceState, level: bytes) -> None:
    keeper.process.state.source_state = state
    source = report(Diagnostics("/d"), keeper)["d: source"]
    assert source.level == level
    assert source.message == f"{state.name}, 0.00 frames per second"


def test_the_backend_that_runs(keeper: Keeper) -> None:
    diagnostics, state = Diagnostics("/d"), keeper.process.state
    chosen = {
        "primary": "tensorrt",
        "fallback": "onnxruntime",
        "reason": "as configured",
        "detail": "TensorRT 10.3.0",
    }
    state.backend = json.dumps(chosen)
    status = report(diagnostics, keeper)["d: backend"]
    assert (status.level, status.message) == (OK, "tensorrt runs")
    assert values(status) == {
        "primary": "tensorrt",
        "fallback": "onnxruntime",
        "running": "tensorrt",
        "switches": "0",
        "reason": "as configured",
        "detail": "TensorRT 10.3.0",
    }
    state.degraded = state.backend_role = state.backend_switches = 1
    state.backend_fault = "tensorrt: 2 bad frames in a row, last: NaN"
    status = report(diagnostics, keeper)["d: backend"]
    assert status.level == WARN
    assert status.message == (
        "DEGRADED, onnxruntime runs: tensorrt: 2 bad frames in a row, last: NaN"
    )
    assert values(status)["running"] == "onnxruntime"
    state.degraded = state.backend_role = 0
    state.backend_fault = "fallback onnxruntime: segment 0 failed"
    status = report(diagnostics, keeper)["d: backend"]
    assert (status.level, status.message) == (WARN, "fallback onnxruntime: segment 0 failed")


def test_missing_rights_are_a_warning(keeper: Keeper) -> None:
    diagnostics, state = Diagnostics("/d"), keeper.process.state
    thread = {"name": "capture", "tid": 1, "policy": "SCHED_FIFO", "priority": 80, "cores": [1]}
    state.report = json.dumps({"threads": [thread], "locked_kib": 5, "missing": []})
    status = report(diagnostics, keeper)["d: realtime"]
    assert (status.level, status.message) == (OK, "as asked for")
    assert values(status) == {"thread capture": "SCHED_FIFO 80 on [1]", "locked_kib": "5"}
    state.report = json.dumps({"missing": ["mlockall refused"]})
    status = report(diagnostics, keeper)["d: realtime"]
    assert (status.level, status.message) == (WARN, "1 rights missing")
    assert values(status) == {"missing 0": "mlockall refused"}


def test_incompatible_subscribers_are_listed(keeper: Keeper) -> None:
    status = report(Diagnostics("/d"), keeper, incompatible=["/x on /d/detections: durability"])
    assert status["d: qos"].level == WARN
    assert values(status["d: qos"]) == {"subscriber 0": "/x on /d/detections: durability"}
