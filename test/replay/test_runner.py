from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from perception_rt.cli import run
from perception_rt.core.errors import UnavailableError
from perception_rt.core.frame import RECORD_DTYPE, Outcome, Stage
from perception_rt.latency.recorder import Recorder
from perception_rt.replay.runner import check

ROOT = Path(__file__).resolve().parents[2]
BAG = ROOT / "test" / "data" / "pedestrians_mcap"
MS = 1_000_000


def records(count: int, late_ns: int = 100_000) -> NDArray[Any]:
    """Met frames, one each 100 ms, captured ``late_ns`` after their instant, left after 60 ms."""
    rows = np.zeros(count, RECORD_DTYPE)
    rows["frame_id"] = np.arange(1, count + 1)
    rows["outcome"] = Outcome.OK
    rows["capture_stamp_ns"] = 10**12 + np.arange(count) * 100 * MS
    rows["start_ns"][:, Stage.CAPTURE] = rows["capture_stamp_ns"] + late_ns
    rows["end_ns"][:, Stage.CAPTURE] = rows["start_ns"][:, Stage.CAPTURE] + 3 * MS
    rows["left_ns"] = rows["capture_stamp_ns"] + 60 * MS
    return rows


def test_a_sound_run_is_valid_and_its_player_is_measured() -> None:
    reasons, player = check(records(60), 0, 60, 60)
    assert reasons == []
    assert player == {
        "lateness_p50_ns": 100_000,
        "lateness_p99_ns": 100_000,
        "lateness_max_ns": 100_000,
        "bound_ns": 50 * MS,
    }


def test_overflow_is_invalid() -> None:
    assert check(records(60), 2, 60, 60)[0] == [
        "recorder overflow: 2 records were lost, ask for a shorter run"
    ]


def test_nothing_recorded_is_invalid() -> None:
    assert check(records(0), 0, 0, 0) == (["no frame was recorded"], {})


def test_a_late_player_is_invalid() -> None:
    reasons, player = check(records(60, late_ns=51 * MS), 0, 60, 60)
    assert reasons == ["player late: p99 51.0 ms after the scheduled instant, bound 50.0 ms"]
    assert player["lateness_p50_ns"] == 51 * MS


@pytest.mark.parametrize("count", [1, 5])
def test_a_player_without_a_period_is_not_judged(count: int) -> None:
    rows = records(count, late_ns=51 * MS)
    rows["capture_stamp_ns"] = 10**12
    rows["left_ns"] = 10**12 + 500 * MS
    reasons, player = check(rows, 0, count, count)
    assert reasons == []
    assert player["bound_ns"] is None


def test_a_long_run_is_given_half_a_gigabyte_of_records_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def create(capacity: int) -> None:
        asked.append(capacity)
        raise UnavailableError("no memory")

    monkeypatch.setattr(Recorder, "create", create)
    assert run(["replay", str(BAG), "--seconds", "1000000"]) == 69
    assert run(["replay", str(BAG), "--loop", "5000"]) == 69
    assert run(["replay", str(BAG)]) == 69
    assert asked == [2_000_000, 300_060, 100_000]


def test_frames_that_the_recording_holds_and_were_not_delivered_are_named() -> None:
    reasons, _ = check(records(59), 0, 59, 60)
    assert reasons == ["missing frames: the recording holds 60, 59 were delivered"]


@pytest.mark.parametrize("hole", [0, 30, 59])
def test_a_frame_without_record_is_invalid(hole: int) -> None:
    reasons, _ = check(np.delete(records(60), hole), 0, 60, 60)
    assert reasons == ["missing frames: 60 delivered, 59 different frame ids in 59 records"]


def test_a_frame_recorded_twice_is_invalid() -> None:
    twice = np.concatenate([records(60), records(60)[7:8]])
    assert check(twice, 0, 60, 60)[0] == [
        "missing frames: 60 delivered, 60 different frame ids in 61 records"
    ]


def test_a_negative_latency_is_invalid() -> None:
    rows = records(60)
    rows["left_ns"][5] = rows["capture_stamp_ns"][5] - 1
    assert check(rows, 0, 60, 60)[0] == [
        "negative latency: 1 stages or frames ended before they began"
    ]


def test_a_stage_that_ends_before_it_begins_is_invalid_and_one_that_did_not_end_is_not() -> None:
    rows = records(60)
    rows["start_ns"][5, Stage.QUEUE] = 2 * 10**12
    assert check(rows, 0, 60, 60)[0] == []
    rows["end_ns"][5, Stage.QUEUE] = 10**12
    assert check(rows, 0, 60, 60)[0] == [
        "negative latency: 1 stages or frames ended before they began"
    ]


def test_lockstep_runs_every_frame_and_is_deterministic(tmp_path: Path) -> None:
    results = []
    for name in ("a.json", "b.json"):
        arguments = [
            "replay",
            str(BAG),
            "--lockstep",
            "--exit",
            "0",
            "--json",
            str(tmp_path / name),
        ]
        assert run(arguments) == 0
        results.append(json.loads((tmp_path / name).read_text()))
    first, second = results
    assert (first["mode"], first["exit_head"], first["exit_count"]) == ("lockstep", 0, 3)
    assert first["frame_count"] == 60
    assert first["failed_count"] == 0
    assert first["frames"][0]["frame_id"] == 1
    assert [frame["frame_id"] for frame in first["frames"]] == list(range(1, 61))
    assert set(first["stages"]) == {"preprocess", "segment 0", "postprocess"}
    assert all(times["n"] == 60 and times["p50_ns"] > 0 for times in first["stages"].values())
    assert (first["digest"], first["detection_count"]) == (
        second["digest"],
        second["detection_count"],
    )


def test_lockstep_at_the_deepest_exit_sees_people_in_every_frame(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    assert run(["replay", str(BAG), "--lockstep", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["exit_head"] == 2
    assert min(frame["detections"] for frame in result["frames"]) >= 1
    assert set(result["stages"]) == {
        "preprocess",
        "segment 0",
        "segment 1",
        "segment 2",
        "postprocess",
    }


def test_real_time_replay_accounts_for_every_frame(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    # Faster than recorded, so that the test is short; the budget is long enough for any machine.
    arguments = ["replay", str(BAG), "--deadline-ms", "60000", "--rate", "2", "--json", str(out)]
    code = run(arguments)
    result = json.loads(out.read_text())
    assert result["mode"] == "real_time"
    assert result["budget_ns"] == 60_000 * MS
    assert result["delivered"] == 60
    assert result["summary"]["n"] == 60
    assert sum(result["summary"]["outcomes"].values()) == 60
    assert result["first_exit_p99_ns"] > 0
    assert {thread["name"] for thread in result["realtime"]["threads"]} == {
        "capture",
        "deadline",
        "inference",
    }
    assert code == (0 if result["valid"] else 3)
    # Only a machine that starves the player may make the run invalid.
    assert all(reason.startswith("player late") for reason in result["reasons"])
    if os.geteuid() == 0:
        assert {thread["policy"] for thread in result["realtime"]["threads"]} == {"SCHED_FIFO"}


def broken_bag(path: Path, count: int) -> Path:
    """A bag whose pictures are no JPEG."""
    store = get_typestore(Stores.ROS2_HUMBLE)
    kind = "sensor_msgs/msg/CompressedImage"
    with Writer(path, version=8, storage_plugin=StoragePlugin.MCAP) as writer:
        connection = writer.add_connection("/image", kind, typestore=store)
        for k in range(count):
            stamp = store.types["builtin_interfaces/msg/Time"](sec=1 + k, nanosec=0)
            header = store.types["std_msgs/msg/Header"](stamp=stamp, frame_id="cam")
            data = np.frombuffer(b"not a jpeg", np.uint8)
            message = store.types[kind](header=header, format="jpeg", data=data)
            writer.write(connection, (1 + k) * 10**9, store.serialize_cdr(message, kind))
    return path


@pytest.mark.parametrize("count", [1, 3])
def test_a_recording_without_a_usable_frame_is_invalid(
    count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bag, out = broken_bag(tmp_path / "bag", count), tmp_path / "a.json"
    assert run(["replay", str(bag), "--rate", "20", "--json", str(out)]) == 3
    reasons = json.loads(out.read_text())["reasons"]
    assert reasons[-1].startswith(f"no usable frame: all {count} FAILED, the first: ")
    assert not reasons[-1].endswith("in the network")
    shown, said = capfd.readouterr()
    assert shown.startswith("budget 100.0 ms\n")
    assert f"INVALID: {reasons[-1]}" in said
    assert ("note: one frame, or equal stamps" in said) is (count == 1)


def test_a_factor_is_resolved_against_the_warm_up(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    run(
        [
            "replay",
            str(BAG),
            "--deadline-ms",
            "1.5x",
            "--rate",
            "4",
            "--loop",
            "2",
            "--json",
            str(out),
        ]
    )
    result = json.loads(out.read_text())
    assert result["deadline_factor"] == 1.5
    assert result["budget_ns"] == round(1.5 * result["first_exit_p99_ns"])
    assert result["delivered"] >= 120
    assert result["epochs"] >= 2


def test_an_interrupted_replay_leaves_no_worker(tmp_path: Path) -> None:
    # Started in the background of a shell, the tests inherit a SIGINT that is ignored.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from perception_rt.cli import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "replay", str(BAG), "--seconds", "600"],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    worker = ""
    try:
        while not worker:
            assert process.poll() is None
            worker = children.read_text().strip()
        watch = os.pidfd_open(int(worker))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        # A pidfd is readable when its process has ended.
        assert select.select([watch], [], [], 30)[0] == [watch], "the worker outlives its parent"
        os.close(watch)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
