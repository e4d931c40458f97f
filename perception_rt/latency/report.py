"""A run's records as numbers for a program and as tables for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perception_rt.core.clock import NS_PER_MS
from perception_rt.core.frame import Outcome, Stage, stage_name
from perception_rt.latency.stats import (
    CENSORED_NS,
    Quantile,
    clopper_pearson,
    latencies,
    longest_run,
    missed,
    quantile_interval,
    repeat_rate,
)

if TYPE_CHECKING:
    from rich.table import Table

FORMAT_VERSION = 1
CONFIDENCE = 0.95
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


def summarise(
    records: NDArray[np.void], exit_count: int, frame_skip: bool = False
) -> dict[str, Any]:
    """The summary of a run, ready for JSON; its fields are documented in docs/json.md.

    Args:
        records: ``RECORD_DTYPE`` [n], in the order of their outcomes.
        exit_count: exit heads of the model.
        frame_skip: replaced frames were skipped by wish, and are no misses.
    """
    met = records[records["outcome"] <= Outcome.OVERRUN]
    budgets = records["budget_ns"]
    latency = latencies(records, frame_skip)
    censored = budgets[missed(records, frame_skip)]
    censored_from_ns = int(censored.min()) if len(censored) else 0
    outcome_counts = np.bincount(records["outcome"], minlength=len(Outcome))
    head_counts = np.bincount(met["exit_head"].clip(0), minlength=exit_count)
    return {
        "format_version": FORMAT_VERSION,
        "n": len(records),
        "frame_skip": frame_skip,
        "budget_ns": [int(budgets.min()), int(budgets.max())] if len(records) else None,
        "outcomes": {outcome.name: int(outcome_counts[outcome]) for outcome in Outcome},
        "exit_heads": [int(count) for count in head_counts],
        "misses": _misses(records, frame_skip),
        "end_to_end": _distribution(latency, censored_from_ns),
        "age": _distribution(met["left_ns"] - met["capture_stamp_ns"]),
        "stages": {
            stage_name(index): _distribution(_durations(records, index))
            for index in _stages(exit_count)
        },
        "suspect": _suspect(records),
    }


def _stages(exit_count: int) -> list[int]:
    """Stage indices in the order in which a frame passes them."""
    segments = range(Stage.SEGMENT_0, Stage.SEGMENT_0 + exit_count)
    before = (Stage.CAPTURE, Stage.QUEUE, Stage.PREPROCESS)
    return [*before, *segments, Stage.POSTPROCESS, Stage.PUBLISH]


def _durations(records: NDArray[np.void], index: int) -> NDArray[np.int64]:
    start, end = records["start_ns"][:, index], records["end_ns"][:, index]
    ran = (start != 0) & (end != 0)
    return np.asarray(end[ran] - start[ran])


def _misses(records: NDArray[np.void], frame_skip: bool) -> dict[str, Any]:
    miss = missed(records, frame_skip)
    if frame_skip:
        miss = miss[records["outcome"] != Outcome.REPLACED]
    n, count = len(miss), int(np.count_nonzero(miss))
    low, high = clopper_pearson(count, n, CONFIDENCE)
    return {
        "n": n,
        "count": count,
        "rate": count / n if n else None,
        "confidence": CONFIDENCE,
        "low": low,
        "high": high,
        "one_sided_high": clopper_pearson(count, n, CONFIDENCE, sided=1)[1],
        "longest_run": longest_run(miss),
        "repeat_rate": repeat_rate(miss),
    }


def _distribution(samples: NDArray[np.int64], censored_from_ns: int = 0) -> dict[str, Any]:
    """Quantiles of ``samples``; a censored one is stated as at least ``censored_from_ns``."""
    known = samples[samples != CENSORED_NS]
    return {
        "n": len(samples),
        "censored": len(samples) - len(known),
        "min_ns": int(known.min()) if len(known) else None,
        "max_ns": int(known.max()) if len(known) else None,
        "quantiles": {
            name: _quantile(quantile_interval(samples, q, CONFIDENCE), censored_from_ns)
            for name, q in QUANTILES.items()
        },
    }


def _quantile(quantile: Quantile, censored_from_ns: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "estimable": quantile.value is not None,
        "needed": quantile.needed,
        "at_least": [],
    }
    for name in ("value", "low", "high"):
        ns = getattr(quantile, name)
        if ns == CENSORED_NS:
            ns = censored_from_ns
            result["at_least"].append(name)
        result[f"{name}_ns"] = ns
        result[f"{name}_ms"] = None if ns is None else ns / NS_PER_MS
    return result


def _suspect(records: NDArray[np.void]) -> dict[str, int]:
    """Counts of what cannot be in a sound run; any of them above 0 makes its numbers worthless."""
    start, end = records["start_ns"], records["end_ns"]
    backward = (start != 0) & (end != 0) & (end < start)
    left = records["left_ns"]
    ids = np.unique(records["frame_id"])
    span = int(ids[-1]) - int(ids[0]) + 1 if len(ids) else 0
    return {
        "negative_latency": int(((left != 0) & (left < records["capture_stamp_ns"])).sum()),
        "negative_stage": int(backward.any(axis=1).sum()),
        "duplicate_frames": len(records) - len(ids),
        "missing_frames": span - len(ids),
    }


def tables(summary: dict[str, Any]) -> list[Table]:
    """Two tables for a terminal: what became of the frames, and how long they took."""
    return [_outcome_table(summary), _latency_table(summary)]


def _outcome_table(summary: dict[str, Any]) -> Table:
    from rich.table import Table

    misses = summary["misses"]
    table = Table(title="Frames")
    table.add_column("outcome")
    table.add_column("frames", justify="right")
    table.add_column("share", justify="right")
    n = summary["n"]
    for name, count in summary["outcomes"].items():
        table.add_row(name, f"{count:,}", f"{count / n:.2%}" if n else "-")
    for head, count in enumerate(summary["exit_heads"]):
        table.add_row(f"exit head {head}", f"{count:,}", f"{count / n:.2%}" if n else "-")
    table.add_section()
    rate = "-" if misses["rate"] is None else f"{misses['rate']:.4%}"
    interval = f"{misses['low']:.4%} to {misses['high']:.4%}"
    table.add_row("missed", f"{misses['count']:,} of {misses['n']:,}", f"{rate}\n{interval}")
    table.add_row("longest run of misses", f"{misses['longest_run']:,}", "")
    table.caption = "intervals at 95%"
    return table


def _latency_table(summary: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="Latency in ms")
    table.add_column("stage")
    table.add_column("n", justify="right")
    for name in QUANTILES:
        table.add_column(name, justify="right")
    rows = {"end to end": summary["end_to_end"], "age": summary["age"], **summary["stages"]}
    for name, row in rows.items():
        table.add_row(name, f"{row['n']:,}", *(_cell(row["quantiles"][q]) for q in QUANTILES))
    table.caption = (
        "intervals at 95%; end to end counts every frame, a miss as longer than its budget"
    )
    return table


def _cell(quantile: dict[str, Any]) -> str:
    if not quantile["estimable"]:
        return f"not estimable\nneeds {quantile['needed']:,}"
    texts = {
        name: (">= " if name in quantile["at_least"] else "") + f"{quantile[f'{name}_ms']:.2f}"
        for name in ("value", "low", "high")
    }
    return f"{texts['value']}\n{texts['low']} to {texts['high']}"
