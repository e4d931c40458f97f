"""What a user writes for a deadline: milliseconds, or a multiple of the first exit's time."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

from perception_rt.core.clock import NS_PER_MS, NS_PER_S
from perception_rt.core.errors import UsageError

MAX_BUDGET_NS = 3600 * NS_PER_S
"""Longest budget accepted: an hour, far above any use, far below an overflow."""
MAX_FACTOR = 1000

_FORM = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(x?)", re.ASCII)


class DeadlineSpec(NamedTuple):
    """A budget in nanoseconds or a factor on the first exit's p99: one is set, the other None."""

    ns: int | None
    factor: float | None

    def resolve(self, first_exit_p99_ns: int) -> int:
        """The budget in nanoseconds.

        Args:
            first_exit_p99_ns: p99 of the time from the start of preprocess to the first exit's
                answer, measured in warm-up, nanoseconds; used by a factor only.

        Raises:
            UsageError: a factor, and nothing measured to multiply.
        """
        if self.ns is not None:
            return self.ns
        assert self.factor is not None
        if first_exit_p99_ns <= 0:
            raise UsageError(
                f"deadline {self.factor:g}x needs the first exit's measured time,"
                f" got {first_exit_p99_ns} ns: give the deadline in milliseconds"
            )
        return round(self.factor * first_exit_p99_ns)


def parse_deadline(text: str) -> DeadlineSpec:
    """Read ``300`` or ``33.3`` (milliseconds) or ``1.4x`` (times the first exit's p99).

    Raises:
        UsageError: zero, negative, not a number, or beyond an hour or 1000x.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"deadline '{text}' cannot be read: give milliseconds (300, 33.3) or a multiple of the"
            " first exit's p99 (1.4x)"
        )
    number = Decimal(match[1])
    if match[2]:
        if not 0 < number <= MAX_FACTOR:
            raise UsageError(f"deadline '{text}' must be above 0x and at most {MAX_FACTOR}x")
        return DeadlineSpec(None, float(number))
    ns = int((number * NS_PER_MS).to_integral_value())
    if not 0 < ns <= MAX_BUDGET_NS:
        raise UsageError(
            f"deadline '{text}' must be above 0 and at most {MAX_BUDGET_NS // NS_PER_MS} ms"
        )
    return DeadlineSpec(ns, None)
