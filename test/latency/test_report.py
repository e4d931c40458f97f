"""The summary of a run against numbers worked out by hand."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from perception_rt.core.frame import RECORD_DTYPE, Outcome, Stage
from perception_rt.latency.report import summarise, tables

MS = 1_000_000
BUDGET = 50 * MS


def make_records(outcomes, latency_ms=10):
    """One frame every 100 ms; met frames leave after ``latency_ms`` plus their index / 10 ms."""
    records = np.zeros(len(outcomes), RECORD_DTYPE)
    for i, (record, outcome) in enumerate(zip(records, outcomes)):
        stamp = (1 + i) * 100 * MS
        record["frame_id"] = i + 1
        record["outcome"] = outcome
        record["exit_head"] = -1
        record["exit_count"] = 2
        record["capture_stamp_ns"] = stamp
        record["budget_ns"] = BUDGET
        record["deadline_ns"] = stamp + BUDGET
        if Outcome(outcome).met:
            record["exit_head"] = 1 if outcome == Outcome.OK else 0
            record["left_ns"] = stamp + latency_ms * MS + i * MS // 10
            record["start_ns"][Stage.SEGMENT_0] = stamp
            record["end_ns"][Stage.SEGMENT_0] = stamp + 5 * MS
    return records


def test_counts():
    outcomes = [Outcome.OK] * 6 + [Outcome.EARLY] * 2 + [Outcome.OVERRUN]
    outcomes += [Outcome.LATE, Outcome.LATE, Outcome.EXPIRED, Outcome.REPLACED, Outcome.FAILED]
    summary = summarise(make_records(outcomes), 2)
    assert summary["n"] == 14
    assert summary["budget_ns"] == [BUDGET, BUDGET]
    assert summary["outcomes"] == {
        "OK": 6, "EARLY": 2, "OVERRUN": 1, "LATE": 2, "EXPIRED": 1, "REPLACED": 1, "FAILED": 1,
    }  # fmt: skip
    assert summary["exit_heads"] == [3, 6]
    misses = summary["misses"]
    assert (misses["n"], misses["count"], misses["longest_run"]) == (14, 5, 5)
    assert misses["rate"] == pytest.approx(5 / 14)
    assert (misses["low"], misses["high"]) == pytest.approx((0.12760, 0.64862), abs=1e-5)
    assert misses["repeat_rate"] == 1.0
    assert summary["suspect"] == {
        "negative_latency": 0, "negative_stage": 0, "duplicate_frames": 0, "missing_frames": 0,
    }  # fmt: skip


def test_skipped_frames_are_no_misses_where_skipping_is_asked_for():
    records = make_records([Outcome.OK, Outcome.REPLACED, Outcome.OK, Outcome.LATE])
    misses = summarise(records, 2, frame_skip=True)["misses"]
    assert (misses["n"], misses["count"]) == (3, 1)
    misses = summarise(records, 2)["misses"]
    assert (misses["n"], misses["count"]) == (4, 2)


def test_quantiles_carry_n_and_interval_or_what_they_need():
    summary = summarise(make_records([Outcome.OK] * 100), 2)
    assert summary["end_to_end"]["n"] == 100
    assert summary["end_to_end"]["min_ns"] == 10 * MS
    assert summary["end_to_end"]["max_ns"] == 19_900_000
    assert summary["end_to_end"]["quantiles"]["p50"] == {
        "estimable": True, "needed": 6, "at_least": [],
        "value_ns": 14_900_000, "low_ns": 13_900_000, "high_ns": 16_000_000,
        "value_ms": 14.9, "low_ms": 13.9, "high_ms": 16.0,
    }  # fmt: skip
    assert summary["end_to_end"]["quantiles"]["p99"] == {
        "estimable": False, "needed": 368, "at_least": [],
        "value_ns": None, "low_ns": None, "high_ns": None,
        "value_ms": None, "low_ms": None, "high_ms": None,
    }  # fmt: skip


def test_misses_count_as_longer_than_their_budget():
    summary = summarise(make_records([Outcome.OK] * 60 + [Outcome.LATE] * 40), 2)
    end_to_end = summary["end_to_end"]
    assert (end_to_end["n"], end_to_end["censored"]) == (100, 40)
    p50 = end_to_end["quantiles"]["p50"]
    assert (p50["value_ns"], p50["high_ns"], p50["at_least"]) == (14_900_000, BUDGET, ["high"])
    p90 = end_to_end["quantiles"]["p90"]
    assert (p90["value_ms"], p90["at_least"]) == (50.0, ["value", "low", "high"])
    assert (summary["age"]["n"], summary["age"]["censored"]) == (60, 0)


def test_stages_are_in_the_order_of_a_frame_and_count_where_they_ran():
    summary = summarise(make_records([Outcome.OK, Outcome.EXPIRED, Outcome.OK]), 2)
    assert list(summary["stages"]) == [
        "capture", "queue", "preprocess", "segment 0", "segment 1", "postprocess", "publish",
    ]  # fmt: skip
    assert summary["stages"]["segment 0"]["n"] == 2
    assert summary["stages"]["segment 0"]["max_ns"] == 5 * MS
    assert summary["stages"]["segment 1"]["n"] == 0


def test_what_cannot_be_is_counted():
    records = make_records([Outcome.OK] * 5)
    records["left_ns"][1] = records["capture_stamp_ns"][1] - 1
    records["end_ns"][2, Stage.SEGMENT_0] = records["start_ns"][2, Stage.SEGMENT_0] - 1
    records["frame_id"] = [1, 2, 2, 5, 8]
    assert summarise(records, 2)["suspect"] == {
        "negative_latency": 1, "negative_stage": 1, "duplicate_frames": 1, "missing_frames": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    "outcomes", [[], [Outcome.FAILED], [Outcome.OK] * 50 + [Outcome.LATE] * 50]
)
def test_every_summary_is_json_and_prints(outcomes):
    rich_console = pytest.importorskip("rich.console")
    summary = summarise(make_records(outcomes), 2)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    console = rich_console.Console(width=100, file=io.StringIO(), record=True)
    for table in tables(summary):
        console.print(table)
    text = console.export_text()
    assert "exit head 1" in text
    assert "needs 3,688" in text
    if len(outcomes) == 100:
        assert "50 of 100" in text
        assert "50.0000%" in text
        assert "39.8321% to 60.1679%" in text
        assert ">= 50.00" in text
