"""Quantiles, miss rates and their intervals, from counts alone: exact binomial, no distribution
assumed.

Everything here takes frames as independent. They are not (misses come in bursts), so the sample
sizes are floors and the intervals are too narrow; ``longest_run`` and ``repeat_rate`` show by how
much to distrust them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perception_rt.core.errors import UsageError
from perception_rt.core.frame import Outcome

CENSORED_NS = 2**63 - 1
"""Stands for the latency of a frame that did not answer: longer than its budget, no more known."""


class Quantile(NamedTuple):
    """A quantile with its two-sided interval; nanoseconds.

    Attributes:
        q: the quantile, 0.99 for p99.
        n: samples.
        value: order statistic ceil(q * n), None when not estimable; ``CENSORED_NS`` where it falls
            among misses.
        low, high: ends of the interval, None when not estimable.
        needed: the fewest samples for which the interval exists.
    """

    q: float
    n: int
    value: int | None
    low: int | None
    high: int | None
    needed: int


def _binomial(n: int, p: float) -> tuple[int, NDArray[np.float64]]:
    """First index and probabilities of Bin(n, p), 0 < p < 1, where they are not negligible (below
    e-300).

    Built from the mode outwards by the ratio of neighbours and normalised, so that it neither
    underflows at large n nor needs a gamma function.
    """
    mode = min(int((n + 1) * p), n)
    reach = 40 + ceil(40 * sqrt(n * p * (1 - p)))
    first, last = max(0, mode - reach), min(n, mode + reach)
    j = np.arange(first, last, dtype=np.float64)
    steps = np.log((n - j) / (j + 1) * (p / (1 - p)))
    logs = np.concatenate(([0.0], np.cumsum(steps)))
    weights = np.exp(logs - logs[mode - first])
    return first, weights / weights.sum()


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(B <= k) for B ~ Bin(n, p)."""
    if k < 0:
        return 0.0
    if k >= n or p <= 0.0:
        return 1.0
    if p >= 1.0:
        return 0.0
    first, weights = _binomial(n, p)
    return float(weights[: max(0, k - first + 1)].sum())


def samples_needed(q: float, confidence: float = 0.95) -> int:
    """The fewest samples for which a two-sided order-statistic interval of quantile ``q`` exists.

    The largest sample lies below the quantile with probability q^n, the smallest above it with (1
    - q)^n; both must be at most (1 - confidence) / 2. For p99.99 at 95%: 36,887.
    """
    tail = (1 - confidence) / 2
    return max(1, ceil(log(tail) / log(max(q, 1 - q))))


def quantile_interval(samples: ArrayLike, q: float, confidence: float = 0.95) -> Quantile:
    """Quantile ``q`` of integer samples with its two-sided order-statistic interval.

    With B ~ Bin(n, q): low is the largest order statistic l with P(B <= l - 1) <= (1 - confidence)
    / 2, high the smallest one u with P(B >= u) <= (1 - confidence) / 2 (David and Nagaraja, Order
    Statistics, section 7.1).

    Args:
        samples: integers [n], nanoseconds, in any order; ``CENSORED_NS`` for a latency known only
            to be longer.
        q: above 0 and below 1.
        confidence: above 0 and below 1.

    Raises:
        UsageError: ``q`` or ``confidence`` out of range.
    """
    if not (0.0 < q < 1.0 and 0.0 < confidence < 1.0):
        raise UsageError(
            f"quantile and confidence must lie between 0 and 1, got {q:g} and {confidence:g}"
        )
    ordered = np.sort(np.asarray(samples, dtype=np.int64))
    n = len(ordered)
    needed = samples_needed(q, confidence)
    if n < needed:
        return Quantile(q, n, None, None, None, needed)
    tail = (1 - confidence) / 2
    first, weights = _binomial(n, q)
    low = max(1, first + int(np.searchsorted(np.cumsum(weights), tail, side="right")))
    above = int(np.searchsorted(np.cumsum(weights[::-1]), tail, side="right"))
    high = min(n, first + len(weights) - above)
    rank = min(max(ceil(q * n - 1e-9), 1), n)
    return Quantile(
        q, n, int(ordered[rank - 1]), int(ordered[low - 1]), int(ordered[high - 1]), needed
    )


def clopper_pearson(
    misses: int, n: int, confidence: float = 0.95, sided: int = 2
) -> tuple[float, float]:
    """Exact interval of a miss rate (Clopper and Pearson 1934): every rate that the count does not
    refute.

    Args:
        misses: missed frames.
        n: frames.
        confidence: above 0 and below 1.
        sided: 2, or 1 for an upper bound alone (the lower end is then 0).

    Returns:
        Lower and upper end; (0, 1) without frames.

    Raises:
        UsageError: more misses than frames, or another number of sides.
    """
    if not 0 <= misses <= n or sided not in (1, 2):
        raise UsageError(f"{misses} misses of {n} frames, {sided} sides: no such interval")
    tail = (1 - confidence) / sided
    high = 1.0 if misses == n else _solve(lambda p: binomial_cdf(misses, n, p) > tail)
    low = 0.0
    if misses and sided == 2:
        low = _solve(lambda p: 1.0 - binomial_cdf(misses - 1, n, p) <= tail)
    return low, high


def _solve(holds: Callable[[float], bool]) -> float:
    """The p in [0, 1] at which ``holds`` turns from true to false, by bisection."""
    low, high = 0.0, 1.0
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return high
        if holds(middle):
            low = middle
        else:
            high = middle


def frames_needed(rate: float, misses: int, confidence: float = 0.95) -> int:
    """The fewest frames with ``misses`` misses that show a miss rate of at most ``rate``,
    one-sided.

    The smallest n with P(B <= misses) <= 1 - confidence for B ~ Bin(n, rate). For 1e-4 at 95% and
    0, 1, 2, 3 misses: 29,956, 47,437, 62,956, 77,535.

    Raises:
        UsageError: ``rate`` not between 0 and 1, or ``misses`` negative.
    """
    if not 0.0 < rate < 1.0 or misses < 0:
        raise UsageError(
            f"a rate must lie between 0 and 1 and misses be 0 or more, got {rate:g}, {misses}"
        )
    low, high = misses, misses + 1
    while binomial_cdf(misses, high, rate) > 1 - confidence:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if binomial_cdf(misses, middle, rate) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def missed(records: NDArray[np.void], frame_skip: bool = False) -> NDArray[np.bool_]:
    """Which frames count as misses, bool [n], in the order of ``records``.

    Args:
        records: ``RECORD_DTYPE`` [n].
        frame_skip: replaced frames were skipped by wish and count as met.
    """
    outcome = records["outcome"]
    miss = outcome > Outcome.OVERRUN
    if frame_skip:
        miss &= outcome != Outcome.REPLACED
    return np.asarray(miss)


def latencies(records: NDArray[np.void], frame_skip: bool = False) -> NDArray[np.int64]:
    """From capture stamp to the return of publish(), int64 [n], nanoseconds; misses are
    ``CENSORED_NS``.

    A capture stamp of a recorded source is its scheduled instant, so waiting counts (no
    coordinated omission).

    Args:
        records: ``RECORD_DTYPE`` [n].
        frame_skip: leave out replaced frames, which were skipped by wish.
    """
    if frame_skip:
        records = records[records["outcome"] != Outcome.REPLACED]
    latency = records["left_ns"] - records["capture_stamp_ns"]
    return np.where(records["outcome"] > Outcome.OVERRUN, CENSORED_NS, latency).astype(np.int64)


def longest_run(miss: NDArray[np.bool_]) -> int:
    """The longest run of consecutive misses."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], miss, [False])).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max()) if len(edges) else 0


def repeat_rate(miss: NDArray[np.bool_]) -> float | None:
    """P(miss | the frame before missed); None when no missed frame has a successor."""
    before, after = miss[:-1], miss[1:]
    count = int(np.count_nonzero(before))
    return float(np.count_nonzero(before & after)) / count if count else None
