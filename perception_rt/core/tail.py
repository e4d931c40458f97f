"""Generalised-Pareto tail of durations: a quantile beyond what a short window has seen. Pure.

Fit by probability-weighted moments: J. R. M. Hosking and J. R. Wallis, "Parameter and quantile
estimation for the generalized Pareto distribution", Technometrics 29 (1987), 339-349.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import expm1, log

from perception_rt.core.errors import UsageError

MIN_EXCEEDANCES = 50
"""Exceedances below which no tail is fitted."""
_SHAPE_LIMIT = 0.5
"""The fitted shape is held within +- this: beyond it the estimator's variance has no finite
asymptotic value (Hosking and Wallis 1987, section 3)."""


def pareto_quantile(ascending: Sequence[int], first: int, quantile: float) -> float:
    """The ``quantile`` of all values, from a tail fitted to ``ascending[first:]``; the threshold
    is the value before ``first``.

    With x_j the exceedances in ascending order, a0 = mean(x), a1 = mean(x_j (n - j) / (n - 1)):
    k = a0 / (a0 - 2 a1) - 2, scale = a0 (1 + k), and the quantile lies (1 - p^k) scale / k above
    the threshold, p = (1 - quantile) / (n / len(ascending)) the share of exceedances above it.

    Args:
        ascending: shape (m,), sorted durations, nanoseconds.
        first: index of the first exceedance, 1 to m - ``MIN_EXCEEDANCES``.
        quantile: below 1 and at least the threshold's, 1 - n / m.

    Returns:
        nanoseconds.

    Raises:
        UsageError: too few exceedances, or ``quantile`` below the threshold or not below 1.
    """
    m = len(ascending)
    n = m - first
    if first < 1 or n < MIN_EXCEEDANCES:
        raise UsageError(
            f"a latency tail needs {MIN_EXCEEDANCES} durations above a threshold, got {n} of {m}"
        )
    p = (1.0 - quantile) * m / n
    if not 0.0 < p <= 1.0:
        raise UsageError(
            f"a latency tail from the top {n} of {m} durations has no quantile {quantile:g}"
        )
    threshold = ascending[first - 1]
    total = weighted = 0
    weight = n - 1
    for i in range(first, m):
        above = ascending[i] - threshold
        total += above
        weighted += above * weight
        weight -= 1
    if total == 0:
        return float(threshold)
    a0 = total / n
    a1 = weighted / (n * (n - 1))
    # Ascending order keeps 2 a1 <= a0; equal only when all exceedances are equal (no spread).
    spread = a0 - 2.0 * a1
    k = a0 / spread - 2.0 if spread > 0.0 else _SHAPE_LIMIT
    k = min(max(k, -_SHAPE_LIMIT), _SHAPE_LIMIT)
    scale = a0 * (1.0 + k)
    log_p = log(p)
    # (1 - p^k) / k tends to -log p as k tends to 0.
    return threshold + (scale * -expm1(k * log_p) / k if abs(k) > 1e-9 else -scale * log_p)
