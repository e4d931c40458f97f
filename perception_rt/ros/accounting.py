"""The demo's accounting: what source, worker, subscriber, watchdog and receiver each say, compared
frame by frame.

Pure: it takes what was written down and opens nothing. Sets of frame ids are compared as sets;
nothing is ever computed as a remainder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.frame import RECORD_DTYPE, Outcome, Stage
from perception_rt.latency.report import summarise
from perception_rt.latency.stats import quantile_interval

Row = dict[str, Any]

MIN_PERMIT_SHARE = 0.95
MIN_FOUND_SHARE = 0.95
MAX_SHOWN = 5
PERMIT_CHECK = "permit in at least"
"""How the name of that check begins."""
LABEL = "person"
"""What is to be seen in every frame of the demo's recording."""

MIN_SCORE = 0.5
"""Of a box that counts as seen: above the threshold by which the detector publishes."""

_SEGMENT_STAGE = 3
_STAGES = {
    0: Stage.CAPTURE,
    1: Stage.QUEUE,
    2: Stage.PREPROCESS,
    4: Stage.POSTPROCESS,
    5: Stage.PUBLISH,
}
"""StageTiming.stage, but for segments."""

STATES = ("DEACTIVATED", "OK", "FAILED", "EXPIRED", "SELF_LAG")
"""SupervisionStatus.state by value."""


class Evidence(NamedTuple):
    """What one run left behind, each list in the order of receipt.

    Attributes:
        source: one row per frame that the source delivered (the worker's source log).
        timing: one row per FrameTiming received.
        detections: one row per detections message received.
        supervision: one row per SupervisionStatus received.
        receiver: the safety receiver's summary.
    """

    source: Sequence[Row]
    timing: Sequence[Row]
    detections: Sequence[Row]
    supervision: Sequence[Row]
    receiver: Row


class Check(NamedTuple):
    """One claim about a run, and what was found."""

    name: str
    ok: bool
    found: str


def account(evidence: Evidence, expect_miss: bool) -> Row:
    """Judge one run.

    Args:
        evidence: of the run.
        expect_miss: the deadline was too short for any frame: every frame must be missed, and no
            permit given.

    Returns:
        JSON-ready, see docs/json_commands.md; ``checks`` holds every claim, ``ok`` says whether
        all hold.
    """
    pairs = pair(evidence.timing, evidence.detections)
    checks = _frame_checks(evidence, pairs)
    checks += _miss_checks(evidence) if expect_miss else _met_checks(evidence, pairs)
    outcomes = Counter(Outcome(row["outcome"]).name for row in evidence.timing)
    records = to_records(evidence.timing)
    exit_count = max((row["exit_count"] for row in evidence.timing), default=0)
    ages = [pair.detections["received_ns"] - pair.timing["capture_stamp_ns"] for pair in pairs]
    return {
        "ok": all(check.ok for check in checks),
        "checks": [check._asdict() for check in checks],
        "budget_ns": evidence.timing[-1]["budget_ns"] if evidence.timing else None,
        "delivered": len(evidence.source),
        "reported": len(evidence.timing),
        "published": sum(row["left_ns"] != 0 for row in evidence.timing),
        "received": len(evidence.detections),
        "received_boxes": sum(len(row["boxes"]) for row in evidence.detections),
        "epochs": len({row["epoch"] for row in evidence.source}),
        "outcomes": {outcome.name: outcomes[outcome.name] for outcome in Outcome},
        "summary": summarise(records, exit_count),
        "receipt_age": {
            "n": len(ages),
            "p50_ns": _quantile(ages, 0.5),
            "p90_ns": _quantile(ages, 0.9),
        },
        "watchdog": _watchdog(evidence.supervision),
        "receiver": evidence.receiver,
    }


class Pair(NamedTuple):
    """A detections message with the FrameTiming of its frame."""

    timing: Row
    detections: Row


def pair(timing: Sequence[Row], detections: Sequence[Row]) -> list[Pair]:
    """Match each detections message to the frame it answers.

    A loop repeats header stamps, so the stamp alone does not name a frame: it is the last frame
    with that stamp whose publishing had begun when the message was received. Each frame is
    matched once at most.
    """
    candidates: dict[int, list[tuple[int, Row]]] = {}
    for row in timing:
        begun = [
            start for stage, _, start, _ in row["stages"] if _STAGES.get(stage) is Stage.PUBLISH
        ]
        if begun:
            candidates.setdefault(row["header_stamp_ns"], []).append((begun[0], row))
    for group in candidates.values():
        group.sort(key=lambda entry: entry[0])
    pairs = []
    taken: set[int] = set()
    for message in detections:
        group = candidates.get(message["header_stamp_ns"], [])
        index = bisect_right([begun for begun, _ in group], message["received_ns"]) - 1
        if index >= 0 and group[index][1]["frame_id"] not in taken:
            taken.add(group[index][1]["frame_id"])
            pairs.append(Pair(group[index][1], message))
    return pairs


def to_records(timing: Sequence[Row]) -> NDArray[Any]:
    """FrameTiming rows as ``RECORD_DTYPE`` [n], for ``latency.report``."""
    records = np.zeros(len(timing), RECORD_DTYPE)
    copied = [
        name for name in RECORD_DTYPE.names or () if name not in ("reserved", "start_ns", "end_ns")
    ]
    for record, row in zip(records, timing):
        for name in copied:
            record[name] = row[name]
        for stage, segment, start_ns, end_ns in row["stages"]:
            index = Stage.SEGMENT_0 + segment if stage == _SEGMENT_STAGE else _STAGES[stage]
            record["start_ns"][index] = start_ns
            record["end_ns"][index] = end_ns
    return records


def _frame_checks(evidence: Evidence, pairs: Sequence[Pair]) -> list[Check]:
    timing = evidence.timing
    delivered = [row["frame_id"] for row in evidence.source]
    reported = [row["frame_id"] for row in timing]
    lost, invented = set(delivered) - set(reported), set(reported) - set(delivered)
    twice = [frame for frame, count in Counter(reported).items() if count > 1]
    stamps = {row["frame_id"]: _epoch_stamp(row) for row in evidence.source}
    other = [row["frame_id"] for row in timing if stamps.get(row["frame_id"]) != _epoch_stamp(row)]
    sessions = {row["session_id"] for row in timing}
    totals = timing[-1]["outcome_totals"] if timing else []
    counted = [sum(row["outcome"] == outcome for row in timing) for outcome in Outcome]
    return [
        Check(
            "the source's frames are the disjoint union of the seven outcomes",
            bool(delivered)
            and not (lost or invented or twice)
            and len(set(delivered)) == len(delivered),
            f"{len(delivered)} delivered, {len(reported)} reported"
            + _ids(", without an outcome", lost)
            + _ids(", never delivered", invented)
            + _ids(", reported twice", twice),
        ),
        Check(
            "epoch and header stamp are the source's own",
            bool(timing) and not other and len(sessions) == 1,
            f"{len(timing)} compared, {len(sessions)} session" + _ids(", different", other),
        ),
        Check(
            "the worker's totals agree with what was received",
            counted == totals,
            f"{counted}, its own {totals}",
        ),
        _received_check(evidence, pairs),
    ]


def _received_check(evidence: Evidence, pairs: Sequence[Pair]) -> Check:
    met = {row["frame_id"] for row in evidence.timing if Outcome(row["outcome"]).met}
    # publish() of these returned after the deadline: on their way, but counted as misses.
    late = {
        row["frame_id"]
        for row in evidence.timing
        if row["outcome"] == Outcome.LATE and row["left_ns"]
    }
    matched = {pair.timing["frame_id"] for pair in pairs}
    unknown = len(evidence.detections) - len(pairs)
    return Check(
        "every met frame was received, and nothing else",
        met <= matched <= met | late and not unknown,
        f"{len(met)} met, {len(evidence.detections)} received"
        + _ids(", met but not received", met - matched)
        + _ids(", received but missed", matched - met - late)
        + _ids(", left after the deadline", late)
        + (f", {unknown} of no known frame" if unknown else ""),
    )


def _met_checks(evidence: Evidence, pairs: Sequence[Pair]) -> list[Check]:
    found = sum(
        any(label == LABEL and score >= MIN_SCORE for *_, score, label in row["boxes"])
        for row in evidence.detections
    )
    count = len(evidence.detections)
    wrong = [
        p.timing["frame_id"]
        for p in pairs
        if p.timing["detection_count"] != len(p.detections["boxes"])
    ]
    share = evidence.receiver.get("permit_share_since_first")
    return [
        Check(
            f"at least {MIN_FOUND_SHARE:.0%} of the answers found a {LABEL}",
            count > 0 and found >= MIN_FOUND_SHARE * count and not wrong,
            f"{found} of {count} with a score of {MIN_SCORE:g} or more"
            + _ids(", count differs from FrameTiming", wrong),
        ),
        Check(
            f"{PERMIT_CHECK} {MIN_PERMIT_SHARE:.0%} of the receiver's cycles after the first",
            share is not None and share >= MIN_PERMIT_SHARE,
            "never"
            if share is None
            else f"{share:.2%} of {evidence.receiver['cycles_since_first_permit']} cycles",
        ),
    ]


def _miss_checks(evidence: Evidence) -> list[Check]:
    met = [row["frame_id"] for row in evidence.timing if Outcome(row["outcome"]).met]
    permitted = sum(row["permit"] for row in evidence.supervision)
    receiver = evidence.receiver
    cycles, granted = receiver.get("cycles", 0), receiver.get("cycles_with_permit")
    # A receiver that hears nothing grants nothing either: that would show nothing.
    heard = receiver.get("accepted", 0)
    return [
        Check(
            "every frame is reported as a miss",
            bool(evidence.timing) and not met,
            f"{len(met)} met",
        ),
        Check(
            "no permit, neither given nor granted",
            granted == 0 and heard > 0 and permitted == 0 and bool(evidence.supervision),
            f"granted in {granted} of {cycles} cycles ({heard} PDUs accepted),"
            f" given in {permitted} of {len(evidence.supervision)}",
        ),
    ]


def _watchdog(supervision: Sequence[Row]) -> Row:
    counts = Counter(row["state"] for row in supervision)
    return {
        "cycles_received": len(supervision),
        "cycles_by_state": {name: counts[value] for value, name in enumerate(STATES)},
        "final_state": STATES[supervision[-1]["state"]] if supervision else None,
        "permitted_cycles": sum(row["permit"] for row in supervision),
        "reasons": dict(
            Counter(row["reason"] for row in supervision if row["reason"]).most_common(MAX_SHOWN)
        ),
    }


def _epoch_stamp(row: Row) -> tuple[int, int]:
    return row["epoch"], row["header_stamp_ns"]


def _quantile(values: Sequence[int], q: float) -> int | None:
    return quantile_interval(values, q).value if values else None


def _ids(what: str, ids: Any) -> str:
    if not ids:
        return ""
    shown = sorted(ids)
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return f"{what}: {', '.join(map(str, shown[:MAX_SHOWN]))}{more}"
