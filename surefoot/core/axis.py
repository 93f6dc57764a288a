"""An axis of a drawing: from where to where, and the round numbers along it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

DECADES = 4  # of a log axis, at most: a cosine that ends near 0 would flatten all else
LARGEST, TINY = 1e300, 1e-300  # beyond them the arithmetic of an axis is no longer that of numbers


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, by powers of ten where it is `log`."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one.

        >>> Axis(0, 8).share(2), Axis(1, 100, log=True).share(10)
        (0.25, 0.5)
        """
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Round numbers along it, at most `most` of them; of a log axis every power of ten."""
        if not self.log:
            return round_numbers(self.low, self.high, most)
        decades = range(round(math.log10(self.low)), math.floor(math.log10(self.high) + 1e-9) + 1)
        return [10.0**decade for decade in decades]


def is_drawn(value: float | None) -> TypeGuard[float]:
    """Whether an axis can hold it: None, what is not finite and what is beyond all measure are left out of a drawing."""
    return value is not None and abs(value) < LARGEST


def find_axis(values: Iterable[float | None], *, log: bool = False, decades: int = DECADES) -> Axis | None:
    """From the least to the greatest value; a linear axis starts at 0 where that costs little. None without a value to draw."""
    drawn = [value for value in values if is_drawn(value)]
    positive = [value for value in drawn if value > TINY]
    if log and positive:
        high = max(positive)
        low = 10.0 ** math.floor(math.log10(max(min(positive), high / 10**decades)) + 1e-9)
        return Axis(low if low < high else high / 10, high, log=True)
    if not drawn:
        return None
    low, high = min(drawn), max(drawn)
    if high - low < TINY:
        low, high = min(low, 0.0), max(high, 0.0)
    elif 0 < low < (high - low) / 2:
        low = 0.0
    return Axis(low, high if high - low > TINY else low + 1.0)


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) from `low` to `high`, at most `most` of them.

    >>> round_numbers(0, 1, 5), round_numbers(0, 4680, 4)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 2000.0, 4000.0])
    """
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / max(most, 2)))
    steps = (unit * power * ten for ten in (1, 10, 100) for unit in (1, 2, 2.5, 5))
    step = next(step for step in steps if math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1 <= max(most, 2))
    return [step * count for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
