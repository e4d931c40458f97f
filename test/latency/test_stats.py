"""Intervals against literal numbers, against scipy, and against their definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.errors import UsageError
from perception_rt.core.frame import RECORD_DTYPE, Outcome
from perception_rt.latency.stats import (
    CENSORED_NS,
    Quantile,
    binomial_cdf,
    clopper_pearson,
    frames_needed,
    latencies,
    longest_run,
    missed,
    quantile_interval,
    repeat_rate,
    samples_needed,
)


@pytest.mark.parametrize(
    ("misses", "frames"), [(0, 29_956), (1, 47_437), (2, 62_956), (3, 77_535)]
)
def test_frames_for_a_miss_rate_of_1e_4(misses, frames):
    assert frames_needed(1e-4, misses) == frames
    assert clopper_pearson(misses, frames, sided=1)[1] <= 1e-4
    assert clopper_pearson(misses, frames - 1, sided=1)[1] > 1e-4


@pytest.mark.parametrize(
    ("q", "needed"),
    [(0.5, 6), (0.9, 36), (0.99, 368), (0.999, 3_688), (0.9999, 36_887), (0.01, 368)],
)
def test_samples_for_an_interval(q, needed):
    assert samples_needed(q) == needed
    assert quantile_interval(range(needed - 1), q) == Quantile(
        q, needed - 1, None, None, None, needed
    )
    quantile = quantile_interval(range(needed), q)
    assert quantile.value is not None
    assert quantile.low is not None
    assert quantile.high is not None
    assert quantile.low <= quantile.value <= quantile.high


@pytest.mark.parametrize(
    ("n", "q", "value", "low", "high"),
    [
        (6, 0.5, 3, 1, 6),
        (10, 0.5, 5, 2, 9),  # the classic sign-test interval of ten samples
        (100, 0.5, 50, 40, 61),
        (100, 0.9, 90, 84, 96),
        (400, 0.99, 396, 392, 400),
        (36_887, 0.9999, 36_884, 36_879, 36_887),
    ],
)
def test_order_statistics(n, q, value, low, high):
    samples = np.random.default_rng(1).permutation(np.arange(1, n + 1))
    assert quantile_interval(samples, q)[2:5] == (value, low, high)


@given(st.integers(6, 3000), st.sampled_from([0.1, 0.5, 0.9, 0.99]), st.sampled_from([0.9, 0.95]))
def test_the_interval_is_the_tightest_that_its_definition_allows(n, q, confidence):
    scipy_stats = pytest.importorskip("scipy.stats")
    tail = (1 - confidence) / 2
    _, _, _, low, high, needed = quantile_interval(range(1, n + 1), q, confidence)
    if n < needed:
        assert (low, high) == (None, None)
        return
    assert low is not None
    assert high is not None
    cdf = scipy_stats.binom(n, q).cdf
    assert cdf(low - 1) <= tail < cdf(low)
    assert 1 - cdf(high - 1) <= tail < 1 - cdf(high - 2)


def test_the_interval_covers_the_true_quantile_as_often_as_it_says():
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(2000):
        samples = (rng.exponential(size=400) * 1e6).astype(np.int64)
        _, _, _, low, high, _ = quantile_interval(samples, 0.9)
        assert low is not None
        assert high is not None
        covered += low <= 1e6 * np.log(10) <= high
    assert covered / 2000 >= 0.95 - 3 * (0.95 * 0.05 / 2000) ** 0.5


@pytest.mark.parametrize(
    ("misses", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.3084971),
        (1, 10, 0.0025286, 0.4450161),
        (5, 10, 0.1870860, 0.8129140),
        (10, 10, 0.6915029, 1.0),
        (0, 0, 0.0, 1.0),
        (3, 100_000, 6.1868e-6, 8.7670e-5),
    ],
)
def test_clopper_pearson(misses, n, low, high):
    assert clopper_pearson(misses, n) == pytest.approx((low, high), rel=1e-4)


@given(st.integers(1, 200_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_clopper_pearson_equals_scipy(counts):
    scipy_stats = pytest.importorskip("scipy.stats")
    misses, n = counts
    # The interval's definition by the beta distribution: old releases' binomtest divides by zero.
    beta = scipy_stats.beta
    expected_low = beta.ppf(0.025, misses, n - misses + 1) if misses else 0.0
    expected_high = beta.ppf(0.975, misses + 1, n - misses) if misses < n else 1.0
    low, high = clopper_pearson(misses, n)
    assert low == pytest.approx(expected_low, rel=1e-6, abs=1e-12)
    assert high == pytest.approx(expected_high, rel=1e-6, abs=1e-12)


def test_one_sided_of_no_miss_is_the_rule_of_three():
    low, high = clopper_pearson(0, 1000, sided=1)
    assert low == 0.0
    assert high == pytest.approx(1 - 0.05 ** (1 / 1000))


@given(st.integers(1, 300), st.integers(-2, 302), st.floats(0, 1))
def test_binomial_cdf_equals_scipy(n, k, p):
    scipy_stats = pytest.importorskip("scipy.stats")
    assert binomial_cdf(k, n, p) == pytest.approx(scipy_stats.binom.cdf(k, n, p), abs=1e-12)


@pytest.mark.parametrize("bad", [(-1, 10, 2), (11, 10, 2), (1, 10, 3)])
def test_impossible_counts_are_refused(bad):
    misses, n, sided = bad
    with pytest.raises(UsageError):
        clopper_pearson(misses, n, sided=sided)


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, float("nan")])
def test_impossible_quantiles_are_refused(q):
    with pytest.raises(UsageError):
        quantile_interval([1, 2, 3], q)


@pytest.mark.parametrize(("rate", "misses"), [(0.0, 0), (1.0, 0), (0.1, -1)])
def test_impossible_rates_are_refused(rate, misses):
    with pytest.raises(UsageError):
        frames_needed(rate, misses)


def make_records(*rows):
    """Records of (outcome, capture stamp, left)."""
    records = np.zeros(len(rows), RECORD_DTYPE)
    for record, (outcome, stamp, left) in zip(records, rows):
        record["outcome"], record["capture_stamp_ns"], record["left_ns"] = outcome, stamp, left
    return records


def test_misses_stay_in_the_distribution_as_censored():
    records = make_records(
        (Outcome.OK, 100, 150),
        (Outcome.EARLY, 200, 230),
        (Outcome.OVERRUN, 300, 390),
        (Outcome.LATE, 400, 520),  # left, but late: its answer was not one
        (Outcome.EXPIRED, 500, 0),
        (Outcome.REPLACED, 600, 0),
        (Outcome.FAILED, 700, 0),
    )
    assert latencies(records).tolist() == [50, 30, 90] + [CENSORED_NS] * 4
    assert latencies(records, frame_skip=True).tolist() == [50, 30, 90] + [CENSORED_NS] * 3
    assert missed(records).tolist() == [False] * 3 + [True] * 4
    assert missed(records, frame_skip=True).tolist() == [False] * 3 + [True, True, False, True]


def test_a_quantile_among_misses_is_censored():
    samples = [10] * 5 + [CENSORED_NS] * 5
    assert quantile_interval(samples, 0.5)[2:5] == (10, 10, CENSORED_NS)


@pytest.mark.parametrize(
    ("pattern", "run", "rate"),
    [
        ("", 0, None),
        ("0", 0, None),
        ("1", 1, None),
        ("000", 0, None),
        ("0110100", 2, 1 / 3),
        ("111", 3, 1.0),
        ("0101", 1, 0.0),
        ("1101110011", 3, 4 / 6),
    ],
)
def test_bursts(pattern, run, rate):
    miss = np.array([c == "1" for c in pattern], dtype=np.bool_)
    assert longest_run(miss) == run
    assert repeat_rate(miss) == (rate if rate is None else pytest.approx(rate))
