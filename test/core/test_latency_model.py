"""The rolling quantile against the definition, and the model's bookkeeping."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.errors import UsageError
from perception_rt.core.frame import Stage
from perception_rt.core.latency_model import (
    RELAX_AFTER,
    RELAX_AFTER_FIRST,
    LatencyModel,
    RollingQuantile,
)

DURATIONS = st.integers(0, 10**9)


@pytest.mark.parametrize(
    ("n", "quantile", "expected"),
    [
        (1, 0.99, 1),
        (50, 0.99, 50),  # ceil(0.99 * 51) = 51, above n: the largest
        (99, 0.99, 99),  # 0.99 * 100 is 99, not 100
        (100, 0.99, 100),
        (199, 0.99, 198),
        (256, 0.99, 255),
        (9, 0.5, 5),
        (10, 0.9, 10),
        (19, 0.9, 18),
        (99, 0.55, 55),  # 0.55 * 100 is above 55 in floating point
    ],
)
def test_value_is_the_order_statistic_of_the_definition(n, quantile, expected):
    assert RollingQuantile(range(1, n + 1), quantile, 256).value() == expected


@given(
    st.lists(DURATIONS, min_size=1, max_size=40),
    st.lists(DURATIONS, max_size=120),
    st.integers(1, 50),
    st.sampled_from([0.5, 0.9, 0.99, 0.999]),
)
def test_value_equals_a_plain_computation_over_the_last_window(prior, added, window, quantile):
    rolling = RollingQuantile(prior, quantile, window)
    seen = list(prior)
    for ns in added:
        rolling.add(ns)
        seen.append(ns)
    held = sorted(seen[-window:])
    rank = min(ceil(quantile * (len(held) + 1) - 1e-9), len(held))
    assert rolling.value() == held[rank - 1]


def test_a_slow_run_counts_at_once_and_stays_for_a_window():
    rolling = RollingQuantile([10] * 64, 0.99, 64)
    rolling.add(500)
    assert rolling.value() == 500
    for _ in range(63):
        rolling.add(10)
    assert rolling.value() == 500
    rolling.add(10)
    assert rolling.value() == 10


@pytest.mark.parametrize(
    ("prior", "quantile", "window"),
    [([], 0.99, 8), ([1], 0.0, 8), ([1], 1.0, 8), ([1], float("nan"), 8), ([1], 0.5, 0)],
)
def test_bad_settings_are_refused(prior, quantile, window):
    with pytest.raises(UsageError):
        RollingQuantile(prior, quantile, window)


def test_relax_forgets_the_largest_until_the_quantile_is_typical():
    rolling = RollingQuantile([100, 100, 100, 900, 300], 0.99, 5)
    rolling.relax()
    assert rolling.value() == 300
    rolling.relax()
    assert rolling.value() == 100
    rolling.relax()
    assert rolling.value() == 100


def test_every_stage_has_its_own_quantile():
    model = LatencyModel(2, window=4)
    model.prior(Stage.PREPROCESS, [1, 2])
    model.prior(Stage.SEGMENT_0, [30])
    model.observe(Stage.SEGMENT_0 + 1, 40)
    model.observe(Stage.SEGMENT_0, 50)
    assert model.quantile_ns(Stage.PREPROCESS) == 2
    assert model.quantile_ns(Stage.SEGMENT_0) == 50
    assert model.quantile_ns(Stage.SEGMENT_0 + 1) == 40


def test_a_new_prior_forgets_the_old_state():
    model = LatencyModel(1)
    model.prior(Stage.SEGMENT_0, [900])
    model.prior(Stage.SEGMENT_0, [100, 110])
    assert model.quantile_ns(Stage.SEGMENT_0) == 110


def test_unknown_stages_are_named():
    model = LatencyModel(2)
    with pytest.raises(UsageError, match="segment 1"):
        model.quantile_ns(Stage.SEGMENT_0 + 1)
    for stage in (Stage.CAPTURE, Stage.QUEUE, Stage.SEGMENT_0 + 2):
        with pytest.raises(UsageError, match=f"stage {int(stage)}"):
            model.prior(stage, [1])
    for segments in (0, 9):
        with pytest.raises(UsageError, match="1 to 8"):
            LatencyModel(segments)


def test_a_refused_segment_comes_back():
    """What is never launched is never observed: refusals themselves bring the estimate down."""
    model = LatencyModel(2)
    model.prior(Stage.SEGMENT_0 + 1, [100] * 20 + [900])
    for _ in range(RELAX_AFTER - 1):
        model.refused(1)
    assert model.quantile_ns(Stage.SEGMENT_0 + 1) == 900
    model.refused(1)
    assert model.quantile_ns(Stage.SEGMENT_0 + 1) == 100


def test_refusals_count_in_a_row_only():
    model = LatencyModel(2)
    model.prior(Stage.SEGMENT_0 + 1, [100] * 20 + [900])
    for _ in range(RELAX_AFTER - 1):
        model.refused(1)
    model.observe(Stage.SEGMENT_0 + 1, 100)
    model.refused(1)
    assert model.quantile_ns(Stage.SEGMENT_0 + 1) == 900


def test_a_refused_first_segment_relaxes_all_that_its_exit_needs():
    model = LatencyModel(1)
    stages = (Stage.PREPROCESS, Stage.SEGMENT_0, Stage.POSTPROCESS, Stage.PUBLISH)
    for stage in stages:
        model.prior(stage, [100] * 20 + [900])
    for _ in range(RELAX_AFTER_FIRST):
        model.refused(0)
    assert [model.quantile_ns(stage) for stage in stages] == [100] * 4
