"""How long a stage takes, as a high quantile of its recent durations. Pure; used on the real-time
path.

The estimate is a distribution-free upper order statistic, never mean plus n sigma: latencies have
heavy right tails and come in bursts, so a normal model is wrong exactly where it matters.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from math import ceil

from perception_rt.core.errors import UsageError
from perception_rt.core.frame import MAX_SEGMENTS, STAGE_COUNT, Stage, stage_name
from perception_rt.core.tail import MIN_EXCEEDANCES, pareto_quantile

TAIL_SHARE = 0.2
"""Share of the window that a tail is fitted to: 51 of 256."""
REFIT_EVERY = 16
"""Durations between two fits of the tail."""
RELAX_AFTER = 8
"""Refusals of a deeper segment in a row after which its largest duration is forgotten."""
RELAX_AFTER_FIRST = 2
"""The same for the first segment: each refusal is a frame without an answer."""
_FIRST_EXIT_STAGES = (Stage.PREPROCESS, Stage.SEGMENT_0, Stage.POSTPROCESS, Stage.PUBLISH)


class RollingQuantile:
    """A quantile of the last ``window`` durations.

    ``value`` is order statistic number ceil(quantile * (n + 1)), the largest one while that is
    above n: the smallest one whose expected rank reaches ``quantile`` (Weibull plotting position).
    So it grows within one or two slow runs and shrinks only when the slow run has left the window.

    Where the window is too short for the quantile (that number is above n) and holds 50
    exceedances of its upper fifth, ``value`` is the larger of the largest duration and the
    quantile of a generalised-Pareto tail (``tail``), refitted every 16 durations.

    ``add`` costs two binary searches and two moves inside a list of at most ``window`` entries,
    which is never reallocated once full: about 1 us at 256.

    Args:
        prior: durations in nanoseconds to start from; the last ``window`` of them are kept.
        quantile: above 0 and below 1.
        window: durations kept, at least 1.

    Raises:
        UsageError: no prior, or ``quantile`` or ``window`` out of range.
    """

    __slots__ = (
        "_next",
        "_quantile",
        "_rank",
        "_ring",
        "_since_fit",
        "_sorted",
        "_tail_ns",
        "_window",
    )

    def __init__(self, prior: Sequence[int], quantile: float, window: int) -> None:
        if not 0.0 < quantile < 1.0:
            raise UsageError(f"a latency quantile must lie between 0 and 1, got {quantile:g}")
        if window < 1:
            raise UsageError(f"a latency window must hold at least 1 duration, got {window}")
        kept = [int(ns) for ns in prior[-window:]]
        if not kept:
            raise UsageError(
                "a latency quantile needs a prior: measure the stage in warm-up first"
            )
        self._quantile = quantile
        self._window = window
        self._ring = kept
        self._sorted = sorted(kept)
        self._next = 0  # the oldest entry, once the ring is full
        self._rank = self._rank_of(len(kept))
        self._tail_ns = self._since_fit = 0
        self._fit()

    def _fit(self) -> None:
        self._since_fit = 0
        n = len(self._sorted)
        exceedances = int(TAIL_SHARE * n)
        self._tail_ns = 0
        if exceedances >= MIN_EXCEEDANCES and self._quantile * (n + 1) > n:
            self._tail_ns = ceil(pareto_quantile(self._sorted, n - exceedances, self._quantile))

    def _rank_of(self, n: int) -> int:
        # The small term keeps 0.99 * 100 from becoming 100 when the product is rounded upwards.
        return min(ceil(self._quantile * (n + 1) - 1e-9), n) - 1

    def add(self, ns: int) -> None:
        """Take in one duration in nanoseconds; the oldest one leaves when the window is full."""
        if len(self._ring) < self._window:
            self._ring.append(ns)
            self._rank = self._rank_of(len(self._ring))
        else:
            i = self._next
            del self._sorted[bisect_left(self._sorted, self._ring[i])]
            self._ring[i] = ns
            self._next = i + 1 if i + 1 < self._window else 0
        insort(self._sorted, ns)
        self._since_fit += 1
        if self._since_fit >= REFIT_EVERY:
            self._fit()

    def value(self) -> int:
        """The quantile in nanoseconds."""
        return max(self._sorted[self._rank], self._tail_ns)

    def relax(self) -> None:
        """Forget the largest duration (it becomes the median), unless the quantile is typical
        already: within a quarter of the median.
        """
        median = self._sorted[len(self._sorted) // 2]
        if self.value() * 4 <= median * 5:
            return
        largest = self._sorted.pop()
        self._ring[self._ring.index(largest)] = median
        insort(self._sorted, median)
        self._fit()


class LatencyModel:
    """One rolling quantile for preprocess, every segment, postprocess and publish; indexed by
    ``Stage``.

    Args:
        segments: number of segments, 1 to ``MAX_SEGMENTS``.
        quantile: of each stage's durations.
        window: durations kept of each stage.

    Raises:
        UsageError: a value out of range.
    """

    def __init__(self, segments: int, quantile: float = 0.99, window: int = 256) -> None:
        if not 1 <= segments <= MAX_SEGMENTS:
            raise UsageError(f"a model has 1 to {MAX_SEGMENTS} segments, got {segments}")
        self.segments = segments
        self._quantile = quantile
        self._window = window
        self._stages: list[RollingQuantile | None] = [None] * STAGE_COUNT
        self._refusals = [0] * segments

    def _check(self, stage_index: int) -> None:
        if not Stage.PREPROCESS <= stage_index < Stage.SEGMENT_0 + self.segments:
            raise UsageError(
                f"the latency model has no stage {stage_index} with {self.segments} segments"
            )

    def prior(self, stage_index: int, samples_ns: Sequence[int]) -> None:
        """Start a stage from durations measured in the present clock state; forgets others.

        Raises:
            UsageError: no samples, or no such stage.
        """
        self._check(stage_index)
        self._stages[stage_index] = RollingQuantile(samples_ns, self._quantile, self._window)

    def observe(self, stage_index: int, ns: int) -> None:
        """Take in one duration of a stage, nanoseconds; without a prior it becomes the prior."""
        if stage_index >= Stage.SEGMENT_0:
            self._refusals[stage_index - Stage.SEGMENT_0] = 0
        stage = self._stages[stage_index]
        if stage is None:
            self.prior(stage_index, (ns,))
        else:
            stage.add(ns)

    def refused(self, k: int) -> None:
        """Segment ``k`` was not launched because by this model it did not fit.

        What is never launched is never observed, so a burst of slow runs would keep a segment out
        for ever. After some refusals in a row the largest duration is forgotten; when the segment
        really is that slow, the next launch brings it back.
        """
        self._refusals[k] += 1
        if self._refusals[k] < (RELAX_AFTER if k else RELAX_AFTER_FIRST):
            return
        self._refusals[k] = 0
        stages = (Stage.SEGMENT_0 + k,) if k else _FIRST_EXIT_STAGES
        for stage_index in stages:
            stage = self._stages[stage_index]
            if stage is not None:
                stage.relax()

    def quantile_ns(self, stage_index: int) -> int:
        """The quantile of a stage's recent durations, in nanoseconds.

        Raises:
            UsageError: nothing is known of that stage yet.
        """
        stage = self._stages[stage_index]
        if stage is None:
            name = stage_name(stage_index)
            raise UsageError(
                f"nothing is known of how long {name} takes: give it a prior from warm-up"
            )
        return stage.value()
