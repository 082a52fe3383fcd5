"""Where the lines of an axis lie: at numbers that a person would choose, in the unit of the panel.

Pure; thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LINES = 4
"""An axis has at most so many spaces between its lines, and one more where its ends are no round numbers."""
LONG_STEPS_S = (60, 120, 300, 600, 1_200, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400)
CLOCK_STEPS_S = (1, 2, 5, 10, 15, 20, 30, *LONG_STEPS_S)
LABEL_WIDTH = 74
"""Pixels that a time of day takes, with some room."""


def step_for(span: float, unit: str, *, is_whole: bool) -> float:
    """Smallest round distance that divides `span` into at most `LINES` parts; a whole number where `is_whole`."""
    least = span / LINES
    if unit == "bytes":
        return float(2 ** math.ceil(math.log2(least)))
    if unit == "s" and least > 30:
        return _at_least(LONG_STEPS_S, least)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))
    return max(1.0, math.ceil(step)) if is_whole else step


def lines_between(low: float, high: float, step: float) -> list[float]:
    """Multiples of `step` from `low` to `high`, both included."""
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def clock_lines(start_s: float, end_s: float, width: float) -> list[float]:
    """Round times of day (seconds since the Unix epoch) that fit side by side into `width` pixels."""
    least = (end_s - start_s) / max(1.0, width / LABEL_WIDTH)
    return lines_between(start_s, end_s, _at_least(CLOCK_STEPS_S, least))


def _at_least(steps: Sequence[float], least: float) -> float:
    """The first that is large enough; days beyond the last."""
    return next((step for step in steps if step >= least), steps[-1] * math.ceil(least / steps[-1]))
