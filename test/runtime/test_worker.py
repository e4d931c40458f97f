"""Real worker processes on the real demo bag."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.config import RealtimeConfig, SourceConfig, WorkerConfig
from perception_rt.core.errors import PerceptionRtError, RealtimeError, UnavailableError
from perception_rt.core.frame import Outcome, Stage
from perception_rt.latency.recorder import Recorder
from perception_rt.runtime.shared_state import SourceState, WorkerState
from perception_rt.runtime.worker_process import WorkerProcess

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
BAG = ROOT / "test" / "data" / "pedestrians_mcap"
FRAMES = 60
MS = NS_PER_MS
CONFIG = WorkerConfig(
    model_dir=str(ROOT / "models" / "nanodet_g_416_coco80"),
    source=SourceConfig("bag", str(BAG)),
    budget_ns=300 * MS,
    warmup_runs=50,
)
READY_S = 60.0


def wait_for(condition, timeout_s=20.0):
    """Poll what another process writes; there is no event across processes to wait for."""
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "condition not met in time"
        time.sleep(0.005)


@pytest.fixture
def spawn(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "test"))
    started = []

    def make(config=CONFIG, options=None, **changes):
        if options is not None:
            monkeypatch.setenv("PERCEPTION_RT_TEST_BACKEND", json.dumps(options))
        worker = WorkerProcess(
            dataclasses.replace(config, **changes), module="perception_rt.runtime.worker"
        )
        started.append(worker)
        worker.start()
        return worker

    yield make
    for worker in started:
        worker.close()


@pytest.fixture
def recorder():
    ring = Recorder.create(2000)
    yield ring
    ring.close()


def play_to_the_end(worker):
    worker.wait_ready(READY_S)
    worker.activate()
    wait_for(lambda: worker.state.source_state == SourceState.ENDED)
    worker.deactivate()


def test_every_frame_of_the_bag_has_one_outcome(spawn, recorder, tmp_path):
    log = tmp_path / "source.jsonl"
    worker = spawn(record_fd=recorder.fd, source_log=str(log))
    seen = []
    worker.wait_ready(READY_S, lambda done, total: seen.append((done, total)))
    assert seen[-1][1] == 50
    assert worker.state.first_exit_p99_ns > MS
    # Ready is not active: nothing is delivered.
    assert worker.state.delivered_frames == 0
    play_to_the_end(worker)
    assert worker.stop() == 0

    source = [json.loads(line) for line in log.read_text().splitlines()]
    records = recorder.records()
    assert recorder.overflow == 0
    assert [row["frame_id"] for row in source] == list(range(1, FRAMES + 1))
    assert sorted(records["frame_id"].tolist()) == list(range(1, FRAMES + 1))
    assert sum(worker.state.outcome_totals) == FRAMES
    stamps = {row["frame_id"]: row["header_stamp_ns"] for row in source}
    assert all(stamps[r["frame_id"]] == r["header_stamp_ns"] for r in records)
    met = records[records["outcome"] <= Outcome.OVERRUN]
    assert len(met) > 0
    assert (met["left_ns"] <= met["deadline_ns"]).all()
    assert (met["left_ns"] >= met["capture_stamp_ns"]).all()
    # Stages of one frame follow each other.
    order = [Stage.CAPTURE, Stage.PREPROCESS, Stage.SEGMENT_0, Stage.POSTPROCESS, Stage.PUBLISH]
    starts = np.stack([met["start_ns"][:, s] for s in order], axis=1)
    assert (np.diff(starts, axis=1) >= 0).all()


@pytest.mark.rt
def test_rights_are_granted_to_all_three_threads(spawn):
    if os.geteuid() != 0:
        pytest.skip("needs root (or CAP_SYS_NICE and CAP_IPC_LOCK)")
    worker = spawn()
    worker.wait_ready(READY_S)
    report = json.loads(worker.state.report)
    threads = {t["name"]: (t["policy"], t["priority"]) for t in report["threads"]}
    assert threads == {
        "capture": ("SCHED_FIFO", 80),
        "deadline": ("SCHED_FIFO", 75),
        "inference": ("SCHED_FIFO", 70),
    }
    assert report["missing"] == []
    assert report["locked_kib"] > 10_000
    assert report["gc_frozen"] > 1000
    # What the kernel says of the threads, by their ids.
    for thread in report["threads"]:
        stat = Path(f"/proc/{worker.pid}/task/{thread['tid']}/stat").read_text()
        assert stat.rpartition(")")[2].split()[38] == "1"  # field 41: policy, 1 is SCHED_FIFO


def test_required_rights_that_are_refused_end_the_worker(spawn):
    wrong = RealtimeConfig(required=True, capture_core=999)
    worker = spawn(realtime=wrong)
    with pytest.raises(RealtimeError, match="affinity to core 999 refused"):
        worker.wait_ready(READY_S)
    assert worker.stop() == 77


def test_rights_that_are_refused_but_not_required_are_reported(spawn):
    worker = spawn(realtime=RealtimeConfig(capture_core=999))
    worker.wait_ready(READY_S)
    missing = json.loads(worker.state.report)["missing"]
    assert [line.split(":")[0] for line in missing] == ["deadline thread", "capture thread"] or [
        line.split(":")[0] for line in missing
    ] == ["capture thread", "deadline thread"]


def test_a_segment_that_never_returns_is_a_miss_at_the_deadline(spawn, recorder):
    worker = spawn(
        backend="support.backends:HangingBackend",
        options={"segment": 0, "frame": 53},
        record_fd=recorder.fd,
        budget_ns=60 * MS,
    )
    worker.wait_ready(READY_S)
    worker.activate()
    wait_for(lambda: recorder.count >= 8)
    beat = worker.state.heartbeat_ns
    wait_for(lambda: worker.state.heartbeat_ns > beat)
    # The hung thread is left behind; the process still ends.
    assert worker.stop() == 0
    outcomes = [Outcome(o) for o in recorder.records()["outcome"][:8]]
    assert outcomes[:2] == [Outcome.OK, Outcome.OK]
    assert outcomes[2] == Outcome.LATE
    assert set(outcomes[3:]) == {Outcome.EXPIRED}


def test_faults_of_the_network_are_that_frame_s_only(spawn, recorder):
    worker = spawn(
        backend="support.backends:FaultyBackend",
        options={"segment": 1, "raise_frames": [52], "nan_frames": [54]},
        record_fd=recorder.fd,
    )
    worker.wait_ready(READY_S)
    worker.activate()
    wait_for(lambda: recorder.count >= 5)
    records = recorder.records()[:5]
    # NaN sits in exit 1, which would not have been published: the frame is a fault all the same.
    expected = [Outcome.OK, Outcome.FAILED, Outcome.OK, Outcome.FAILED, Outcome.OK]
    assert [Outcome(o) for o in records["outcome"]] == expected
    assert records["exit_head"].tolist() == [2, -1, 2, -1, 2]


def test_nan_in_the_published_exit_is_a_failed_frame(spawn, recorder):
    worker = spawn(
        backend="support.backends:FaultyBackend",
        options={"segment": 2, "nan_frames": [52]},
        record_fd=recorder.fd,
    )
    worker.wait_ready(READY_S)
    worker.activate()
    wait_for(lambda: recorder.count >= 3)
    records = recorder.records()[:3]
    assert [Outcome(o) for o in records["outcome"]] == [Outcome.OK, Outcome.FAILED, Outcome.OK]


def switching(backend="support.backends:FaultyBackend", **options):
    """A primary double, and behind it a fallback double."""
    return {
        "backend": backend,
        "fallback_backend": "support.backends:ScriptedBackend",
        "options": options,
        "source": SourceConfig("bag", str(BAG), loop=True),
    }


def test_a_primary_that_fails_is_replaced_reported_and_taken_back(spawn, recorder):
    worker = spawn(record_fd=recorder.fd, **switching(raise_frames=[55, 56, 57, 58]))
    worker.wait_ready(READY_S)
    state = worker.state
    chosen = json.loads(state.backend)
    assert chosen["primary"] == "support.backends:FaultyBackend"
    assert chosen["fallback"] == "support.backends:ScriptedBackend"
    assert state.degraded == 0
    worker.activate()
    wait_for(lambda: state.degraded)
    assert state.backend_fault == (
        "support.backends:FaultyBackend: 2 bad frames in a row, last: segment 0 failed: "
        "RuntimeError: scripted fault of frame 56"
    )
    wait_for(lambda: state.backend_role == 1)
    # The first probe meets frame 57 and fails, so does the second one; the third one does not.
    wait_for(lambda: not state.degraded, timeout_s=60.0)
    assert (state.backend_role, state.backend_switches, state.backend_fault) == (0, 2, "")
    told = recorder.count
    wait_for(lambda: recorder.count >= told + 5)
    outcomes = [Outcome(o) for o in recorder.records()["outcome"]]
    # Nothing was lost to the probes or to the way back; a miss or two of this machine's own.
    assert outcomes.count(Outcome.FAILED) == 2
    assert sum(not outcome.met for outcome in outcomes) <= 4
    assert worker.stop() == 0


def test_a_primary_that_hangs_is_replaced_and_the_worker_still_ends(spawn, recorder):
    hanging = "support.backends:HangingBackend"
    worker = spawn(record_fd=recorder.fd, **switching(hanging, segment=0, frame=55))
    worker.wait_ready(READY_S)
    worker.activate()
    wait_for(lambda: worker.state.backend_role == 1)
    assert worker.state.degraded
    told = recorder.count
    wait_for(lambda: recorder.count >= told + 30)
    outcomes = [Outcome(o) for o in recorder.records()["outcome"]]
    assert sum(not outcome.met for outcome in outcomes[told + 1 :]) <= 2
    assert worker.stop() == 0


def test_a_fallback_that_does_not_load_is_said_at_the_start(spawn):
    worker = spawn(**{**switching(), "fallback_backend": "support.backends:Nothing"})
    with pytest.raises(PerceptionRtError, match=r"support\.backends:Nothing' cannot be"):
        worker.wait_ready(READY_S)


def test_auto_says_what_runs_and_why(spawn):
    worker = spawn(backend="auto")
    worker.wait_ready(READY_S)
    chosen = json.loads(worker.state.backend)
    assert chosen["reason"].startswith(f"{chosen['primary']} (the fastest that runs here); ")
    assert "first exit p99 at warm-up: " in chosen["reason"]


def test_activation_can_be_repeated(spawn, recorder):
    worker = spawn(backend="support.backends:ScriptedBackend", options={}, record_fd=recorder.fd)
    worker.wait_ready(READY_S)
    for turn in range(1, 6):
        before = worker.state.delivered_frames
        worker.activate(activation_count=turn)
        wait_for(lambda before=before: worker.state.delivered_frames >= before + 2)
        worker.deactivate()
        assert worker.state.delivered_frames == sum(worker.state.outcome_totals)
        quiet = worker.state.delivered_frames
        count = worker.state.capture_count
        wait_for(lambda count=count: worker.state.capture_count > count + 5)
        assert worker.state.delivered_frames == quiet
    records = recorder.records()
    assert records["frame_id"].tolist() == list(range(1, len(records) + 1))
    assert set(records["epoch"].tolist()) == {0, 1, 2, 3, 4}
    assert worker.stop() == 0


def test_a_looped_bag_is_an_event_not_a_miss(spawn, recorder):
    worker = spawn(
        source=SourceConfig("bag", str(BAG), loop=True, rate=2.0),
        budget_ns=1000 * MS,
        backend="support.backends:ScriptedBackend",
        options={},
        record_fd=recorder.fd,
    )
    worker.wait_ready(READY_S)
    worker.activate()
    wait_for(lambda: recorder.count >= FRAMES + 10)
    records = recorder.records()[: FRAMES + 10]
    assert all(Outcome(o).met for o in records["outcome"])
    assert records["epoch"].tolist() == [0] * FRAMES + [1] * 10
    assert (records["left_ns"] > records["capture_stamp_ns"]).all()


def test_settings_reach_the_next_frame(spawn, recorder):
    worker = spawn(
        backend="support.backends:ScriptedBackend",
        options={"durations_ms": [[5, 5, 5]]},
        record_fd=recorder.fd,
    )
    worker.wait_ready(READY_S)
    worker.activate()
    wait_for(lambda: recorder.count >= 2)
    worker.set_runtime(budget_ns=77 * MS)
    told = recorder.count
    wait_for(lambda: recorder.count >= told + 3)
    budgets = recorder.records()["budget_ns"]
    assert budgets[0] == 300 * MS
    assert set(budgets[told + 1 :].tolist()) == {77 * MS}


def test_a_killed_worker_is_seen_as_such(spawn):
    worker = spawn(backend="support.backends:ScriptedBackend", options={})
    worker.wait_ready(READY_S)
    os.kill(worker.pid, signal.SIGKILL)
    wait_for(lambda: worker.poll() is not None)
    assert worker.poll() == -signal.SIGKILL
    with pytest.raises(UnavailableError, match=r"was ended by signal 9"):
        worker.deactivate()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"model_dir": "nowhere"}, 65, "nowhere"),
        ({"source": SourceConfig("bag", "nowhere.mcap")}, 65, r"nowhere\.mcap"),
        ({"backend": "nothing"}, 64, "backend 'nothing' is unknown"),
        ({"source_log": "/nowhere/log"}, 64, "source_log /nowhere/log cannot be written"),
    ],
)
def test_what_cannot_start_says_why(spawn, changes, code, words, capfd):
    worker = spawn(**changes)
    with pytest.raises(PerceptionRtError, match=words) as raised:
        worker.wait_ready(READY_S)
    assert raised.value.exit_code == code
    assert worker.stop() == code
    assert worker.state.worker_state == WorkerState.FAILED
    # The parent says it; the worker itself is silent.
    assert capfd.readouterr().err == ""


def test_started_by_hand_it_says_so():
    ended = subprocess.run(
        [sys.executable, "-m", "perception_rt.runtime.worker"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 64
    assert ended.stderr == ("error: a worker is started by detector_node or replay, not by hand\n")
