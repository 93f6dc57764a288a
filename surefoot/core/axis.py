"""The axis of a plot: its range and its ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

DECADES = 4  # of a log axis, at most: a cosine that ends near 0 would flatten everything else
# beyond these values the arithmetic of an axis overflows or underflows
LARGEST, TINY = 1e300, 1e-300


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, logarithmic if `log`."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Return the relative position of a value on the axis: 0 at the low end, 1 at the high.

        >>> Axis(0, 8).share(2), Axis(1, 100, log=True).share(10)
        (0.25, 0.5)
        """
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Return the ticks: at most `most` round numbers, or on a log axis every power of ten."""
        if not self.log:
            return round_numbers(self.low, self.high, most)
        decades = range(round(math.log10(self.low)), math.floor(math.log10(self.high) + 1e-9) + 1)
        return [10.0**decade for decade in decades]


def is_drawn(value: float | None) -> TypeGuard[float]:
    """Return whether a plot can show a value: it is not None, finite and below `LARGEST`."""
    return value is not None and abs(value) < LARGEST


def find_axis(
    values: Iterable[float | None], *, log: bool = False, decades: int = DECADES
) -> Axis | None:
    """Return the axis on which a plot can show `values`; None if there is no value to plot.

    A linear axis starts at 0 if that wastes little space. A log axis covers at most `decades`
    powers of ten, down from the largest value. Without a positive value the axis is linear.
    """
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
    """Return at most `most` equally spaced round numbers between `low` and `high`.

    Their distance is 1, 2, 2.5 or 5 times a power of ten.

    >>> round_numbers(0, 1, 5), round_numbers(0, 4680, 4)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 2000.0, 4000.0])
    """
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / max(most, 2)))
    steps = (unit * power * ten for ten in (1, 10, 100) for unit in (1, 2, 2.5, 5))
    step = next(
        step
        for step in steps
        if math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1 <= max(most, 2)
    )
    return [
        step * count
        for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
