"""Has what was compiled paid for itself? The time of a step in eager mode, of a compiled one, and of the compiling."""

from __future__ import annotations

import math

from surefoot.core.statistics import median
from surefoot.core.units import format_number, format_seconds

NUM_TIMED = 20  # compiled steps; the first two belong to the compiling
LEFT_OUT = 2


class Pace:
    """Steps of both kinds as they come; says once, when there are enough, after how many the compiling has paid for itself."""

    def __init__(self) -> None:
        self._eager_s: list[float] = []
        self._compiled_s: list[float] = []
        self._was_told = False

    def add(self, elapsed_s: float, *, is_compiled: bool) -> None:
        timed = self._compiled_s if is_compiled else self._eager_s
        if len(timed) < LEFT_OUT + NUM_TIMED:
            timed.append(elapsed_s)

    def take(self, compiling_s: float) -> str | None:
        """What a compiled step saves and when `compiling_s` are saved, in words: once, where both kinds were timed.

        >>> pace = Pace()
        >>> for number in range(24):
        ...     pace.add(0.002 if number < 2 else 0.0005, is_compiled=number >= 2)
        >>> pace.take(6.0)
        'a compiled step takes 0.25 of an eager one: 6 s of compiling are paid for after 4,000 steps'
        """
        if self._was_told or not self._eager_s or len(self._compiled_s) < LEFT_OUT + NUM_TIMED:
            return None
        self._was_told = True
        eager_s, compiled_s = median(self._eager_s), median(self._compiled_s[LEFT_OUT:])
        share = f"a compiled step takes {format_number(compiled_s / eager_s)} of an eager one"
        if compiled_s >= eager_s:
            return f"{share}: {format_seconds(compiling_s)} of compiling are never paid for"
        steps = math.ceil(round(compiling_s / (eager_s - compiled_s), 6))
        return f"{share}: {format_seconds(compiling_s)} of compiling are paid for after {steps:,} steps"
