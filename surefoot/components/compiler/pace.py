"""Break-even point of compilation: the number of steps that recover the compile time."""

from __future__ import annotations

import math

from surefoot.core.statistics import median
from surefoot.core.units import format_number, format_seconds

NUM_TIMED = 20  # compiled steps; the first two include compilation
LEFT_OUT = 2


class CompilePayback:
    """Comparison of the times of eager and compiled steps.

    `take` reports once after how many steps the compile time is recovered.
    """

    def __init__(self) -> None:
        self._eager_s: list[float] = []
        self._compiled_s: list[float] = []
        self._was_told = False

    def add(self, elapsed_s: float, *, is_compiled: bool) -> None:
        timed = self._compiled_s if is_compiled else self._eager_s
        if len(timed) < LEFT_OUT + NUM_TIMED:
            timed.append(elapsed_s)

    def take(self, compiling_s: float) -> str | None:
        """Return a sentence about the time that a compiled step saves, or None.

        The sentence also says after how many steps the `compiling_s` seconds of compilation are
        recovered. It is returned once, as soon as enough eager and compiled steps were timed.

        >>> pace = CompilePayback()
        >>> for number in range(24):
        ...     pace.add(0.002 if number < 2 else 0.0005, is_compiled=number >= 2)
        >>> print(pace.take(6.0).partition(": ")[2])
        6 s of compilation are recovered after 4,000 steps
        """
        if self._was_told or not self._eager_s or len(self._compiled_s) < LEFT_OUT + NUM_TIMED:
            return None
        self._was_told = True
        eager_s, compiled_s = median(self._eager_s), median(self._compiled_s[LEFT_OUT:])
        share = (
            f"a compiled step takes {format_number(compiled_s / eager_s)} of the time of "
            "an eager step"
        )
        if compiled_s >= eager_s:
            return f"{share}: {format_seconds(compiling_s)} of compilation are never recovered"
        steps = math.ceil(round(compiling_s / (eager_s - compiled_s), 6))
        return (
            f"{share}: {format_seconds(compiling_s)} of compilation are recovered after "
            f"{steps:,} steps"
        )
