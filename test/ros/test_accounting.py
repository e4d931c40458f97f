from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.frame import Outcome, Stage
from perception_rt.ros.accounting import Evidence, account, pair, to_records

MS = 1_000_000
EXITS = 3


def timing(frame_id: int, epoch: int, stamp_ns: int, outcome: Outcome) -> dict[str, Any]:
    """FrameTiming of a frame each 100 ms; a met one was published from 60 to 61 ms."""
    capture_ns = 10**12 + frame_id * 100 * MS
    stages = [[0, -1, capture_ns, capture_ns + 2 * MS]]
    if outcome.met:
        stages += [[3, 1, capture_ns + 20 * MS, capture_ns + 50 * MS]]
        stages += [[5, -1, capture_ns + 60 * MS, capture_ns + 61 * MS]]
    return {
        "header_stamp_ns": stamp_ns,
        "session_id": 7,
        "frame_id": frame_id,
        "epoch": epoch,
        "outcome": int(outcome),
        "exit_head": 1 if outcome.met else -1,
        "exit_count": EXITS,
        "detection_count": 1 if outcome.met else 0,
        "stamp_source": 4,
        "capture_stamp_ns": capture_ns,
        "budget_ns": 100 * MS,
        "deadline_ns": capture_ns + 100 * MS,
        "left_ns": capture_ns + 61 * MS if outcome.met else 0,
        "stages": stages,
        "reason": "",
    }


def evidence(outcomes: list[Outcome], lap: int = 4, permit: bool = True) -> Evidence:
    """A flawless run of a recording of ``lap`` frames, looped."""
    rows, totals = [], [0] * 7
    for index, outcome in enumerate(outcomes):
        row = timing(index + 1, index // lap, 5_000 + index % lap, outcome)
        totals[outcome] += 1
        rows.append({**row, "outcome_totals": list(totals)})
    names = ("frame_id", "epoch", "header_stamp_ns", "capture_stamp_ns")
    detections = [
        {
            "header_stamp_ns": row["header_stamp_ns"],
            "received_ns": row["capture_stamp_ns"] + 61 * MS,
            "boxes": [[1, 2, 3, 4, 0.9, "person"]],
        }
        for row in rows
        if row["outcome"] <= Outcome.OVERRUN
    ]
    cycles = 400 if permit else 0
    return Evidence(
        source=[{name: row[name] for name in names} for row in rows],
        timing=rows,
        detections=detections,
        supervision=[{"state": 1 if permit else 3, "permit": permit, "reason": ""}] * 100,
        receiver={
            "accepted": 100,
            "cycles": 500,
            "cycles_with_permit": cycles,
            "cycles_since_first_permit": cycles,
            "permit_share_since_first": 1.0 if permit else None,
        },
    )


def failing(result: dict[str, Any]) -> list[str]:
    return [check["name"] for check in result["checks"] if not check["ok"]]


MIXED = [Outcome.OK, Outcome.EARLY, Outcome.OVERRUN, *Outcome, Outcome.OK, Outcome.OK]
UNION = "the source's frames are the disjoint union of the seven outcomes"
STAMPS = "epoch and header stamp are the source's own"
TOTALS = "the worker's totals agree with what was received"
RECEIVED = "every met frame was received, and nothing else"
FOUND = "at least 95% of the answers found a person"
PERMIT = "permit in at least 95% of the receiver's cycles after the first"
MISSES = "every frame is reported as a miss"
NO_PERMIT = "no permit, neither given nor granted"


def test_a_flawless_run_holds_every_check() -> None:
    result = account(evidence(MIXED), expect_miss=False)
    assert failing(result) == []
    assert result["ok"] is True
    assert (result["delivered"], result["reported"], result["received"]) == (12, 12, 8)
    assert result["published"] == 8
    assert result["budget_ns"] == evidence(MIXED).timing[-1]["budget_ns"]
    assert result["epochs"] == 3
    assert result["outcomes"] == {
        "OK": 4,
        "EARLY": 2,
        "OVERRUN": 2,
        "LATE": 1,
        "EXPIRED": 1,
        "REPLACED": 1,
        "FAILED": 1,
    }
    assert result["summary"]["exit_heads"] == [0, 8, 0]
    assert result["receipt_age"] == {"n": 8, "p50_ns": 61 * MS, "p90_ns": None}
    assert result["watchdog"]["cycles_by_state"]["OK"] == 100
    assert result["watchdog"]["final_state"] == "OK"


def test_a_run_in_which_all_was_missed_holds_every_check_of_its_kind() -> None:
    missed = evidence([Outcome.EXPIRED] * 9, permit=False)
    assert failing(account(missed, expect_miss=True)) == []
    assert FOUND in failing(account(missed, expect_miss=False))
    assert MISSES in failing(account(evidence(MIXED, permit=False), expect_miss=True))


@pytest.mark.parametrize("expect_miss", [False, True])
def test_nothing_at_all_holds_nothing(expect_miss: bool) -> None:
    result = account(Evidence([], [], [], [], {}), expect_miss)
    assert result["ok"] is False
    assert UNION in failing(result)
    assert (NO_PERMIT if expect_miss else PERMIT) in failing(result)


@pytest.mark.parametrize("frame", range(12))
def test_a_frame_without_timing_is_named(frame: int) -> None:
    run = evidence(MIXED)
    run.timing.pop(frame)  # type: ignore[attr-defined]
    result = account(run, expect_miss=False)
    assert UNION in failing(result)
    found = next(check["found"] for check in result["checks"] if check["name"] == UNION)
    assert found == f"12 delivered, 11 reported, without an outcome: {frame + 1}"


def test_a_frame_that_was_never_delivered_and_one_reported_twice_are_named() -> None:
    run = evidence(MIXED)
    run.source.pop(2)  # type: ignore[attr-defined]
    assert UNION in failing(account(run, expect_miss=False))
    run = evidence(MIXED)
    run.timing.append(run.timing[0])  # type: ignore[attr-defined]
    assert UNION in failing(account(run, expect_miss=False))


def test_a_met_frame_that_was_not_received_is_named() -> None:
    run = evidence(MIXED)
    run.detections.pop(0)  # type: ignore[attr-defined]
    result = account(run, expect_miss=False)
    assert failing(result) == [RECEIVED]
    assert "met but not received: 1" in result["checks"][3]["found"]


def test_a_message_received_twice_or_of_an_unknown_frame_is_counted() -> None:
    run = evidence(MIXED)
    run.detections.append(run.detections[-1])  # type: ignore[attr-defined]
    run.detections.append({**run.detections[-1], "header_stamp_ns": 1})  # type: ignore[attr-defined]
    result = account(run, expect_miss=False)
    assert failing(result) == [RECEIVED]
    assert result["checks"][3]["found"] == "8 met, 10 received, 2 of no known frame"


def test_an_answer_that_left_late_is_a_miss_that_may_be_received() -> None:
    run = evidence([Outcome.OK] * 5)
    row = run.timing[2]
    row["outcome"] = int(Outcome.LATE)
    for later in run.timing[2:]:
        later["outcome_totals"] = [
            later["outcome_totals"][0] - 1,
            *later["outcome_totals"][1:3],
            1,
            *later["outcome_totals"][4:],
        ]
    result = account(run, expect_miss=False)
    assert failing(result) == []
    assert result["checks"][3]["found"] == "4 met, 5 received, left after the deadline: 3"


def test_a_missed_frame_that_was_published_all_the_same_is_named() -> None:
    run = evidence([Outcome.OK] * 5)
    run.timing[2]["outcome"] = int(Outcome.EXPIRED)
    assert RECEIVED in failing(account(run, expect_miss=False))


def test_another_stamp_epoch_or_session_is_named() -> None:
    for key, value in (("header_stamp_ns", 4), ("epoch", 9), ("session_id", 8)):
        run = evidence(MIXED)
        run.timing[5][key] = value
        assert STAMPS in failing(account(run, expect_miss=False))


def test_totals_that_do_not_agree_are_named() -> None:
    run = evidence(MIXED)
    run.timing[-1]["outcome_totals"][0] += 1
    assert failing(account(run, expect_miss=False)) == [TOTALS]


def test_empty_answers_and_wrong_counts_are_named() -> None:
    run = evidence(MIXED)
    run.detections[0]["boxes"] = []
    assert failing(account(run, expect_miss=False)) == [FOUND]
    run = evidence(MIXED)
    for score, label in ((0.9, "dog"), (0.49, "person")):
        run.detections[0]["boxes"] = [[1, 2, 3, 4, score, label]]
        assert failing(account(run, expect_miss=False)) == [FOUND]
    run = evidence([Outcome.OK] * 100)
    run.detections[0]["boxes"] = run.detections[0]["boxes"] * 2
    result = account(run, expect_miss=False)
    assert failing(result) == [FOUND]
    assert result["checks"][4]["found"] == (
        "100 of 100 with a score of 0.5 or more, count differs from FrameTiming: 1"
    )


@pytest.mark.parametrize(("share", "holds"), [(None, False), (0.94, False), (0.95, True)])
def test_the_permit_share_decides(share: float | None, holds: bool) -> None:
    run = evidence(MIXED)
    run.receiver["permit_share_since_first"] = share
    assert (PERMIT not in failing(account(run, expect_miss=False))) is holds


def test_any_permit_and_a_silent_link_fail_the_negative_control() -> None:
    for change in ({"cycles_with_permit": 1}, {"accepted": 0}):
        run = evidence([Outcome.EXPIRED] * 9, permit=False)
        run.receiver.update(change)
        assert failing(account(run, expect_miss=True)) == [NO_PERMIT]
    run = evidence([Outcome.EXPIRED] * 9, permit=False)
    given_once = run._replace(
        supervision=[*run.supervision, {**run.supervision[0], "permit": True}]
    )
    assert failing(account(given_once, expect_miss=True)) == [NO_PERMIT]
    unheard = run._replace(supervision=[])
    assert failing(account(unheard, expect_miss=True)) == [NO_PERMIT]


def test_records_hold_what_frame_timing_says() -> None:
    records = to_records(evidence([Outcome.OK, Outcome.EXPIRED]).timing)
    capture_ns = 10**12 + 100 * MS
    assert records["frame_id"].tolist() == [1, 2]
    assert records["outcome"].tolist() == [0, 4]
    assert records["exit_head"].tolist() == [1, -1]
    assert records["start_ns"][0, Stage.SEGMENT_0 + 1] == capture_ns + 20 * MS
    assert records["end_ns"][0, Stage.PUBLISH] == capture_ns + 61 * MS
    assert records["end_ns"][1, Stage.PUBLISH] == 0


@given(st.lists(st.sampled_from(list(Outcome)), max_size=40), st.integers(1, 7), st.data())
def test_pairing_finds_the_frame_in_spite_of_repeated_stamps(
    outcomes: list[Outcome], lap: int, data: st.DataObject
) -> None:
    run = copy.deepcopy(evidence(outcomes, lap))
    # Received at any time after publishing began, before the frame of the next lap is published.
    met = [row for row in run.timing if row["outcome"] <= Outcome.OVERRUN]
    for row, message in zip(met, run.detections):
        delay_ns = data.draw(st.integers(0, lap * 100 * MS - 1))
        message["received_ns"] = row["capture_stamp_ns"] + 60 * MS + delay_ns
    kept = [i for i in range(len(met)) if data.draw(st.booleans())]
    pairs = pair(run.timing, [run.detections[i] for i in kept])
    assert [p.timing["frame_id"] for p in pairs] == [met[i]["frame_id"] for i in kept]
