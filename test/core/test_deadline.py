"""Deadlines as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.deadline import MAX_BUDGET_NS, DeadlineSpec, parse_deadline
from perception_rt.core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("300", 300_000_000),
        ("33.3", 33_300_000),
        (" 5 ", 5_000_000),
        ("5.", 5_000_000),
        (".5", 500_000),
        ("0.000001", 1),
        ("3600000", MAX_BUDGET_NS),
    ],
)
def test_milliseconds_are_exact(text, ns):
    spec = parse_deadline(text)
    assert spec == DeadlineSpec(ns, None)
    assert spec.resolve(0) == ns


@pytest.mark.parametrize(
    ("text", "p99_ns", "ns"), [("1.4x", 50_000_000, 70_000_000), ("2x", 7, 14), ("0.5x", 3, 2)]
)
def test_a_factor_multiplies_the_first_exit(text, p99_ns, ns):
    assert parse_deadline(text).resolve(p99_ns) == ns


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "0", "0.0", "-1", "-1.4x", "0x", "0.0x", "nan", "nanx", "NaN", "inf", "infx",
        "1e3", "x", "1.4 x", "1,4", "1_000", "1.4X", "300ms", "\u0663", "0.0000001", "3600001",
        "1001x", "1.2.3", "9" * 400,
    ],
)  # fmt: skip
def test_what_is_no_deadline_is_refused(text):
    with pytest.raises(UsageError, match="deadline"):
        parse_deadline(text)


@given(st.text(max_size=12))
def test_any_text_is_a_usable_deadline_or_a_usage_error(text):
    try:
        spec = parse_deadline(text)
    except UsageError:
        return
    assert (spec.ns is None) != (spec.factor is None)
    assert spec.resolve(10**9) > 0


def test_a_factor_without_a_measurement_is_refused():
    with pytest.raises(UsageError, match="milliseconds"):
        parse_deadline("1.4x").resolve(0)
