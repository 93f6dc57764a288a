"""Detection of saves that take longer than the time between them, so that training waits.

They are reported once.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from surefoot.core.units import format_seconds

WORTH_TELLING_S = 2.0  # sum of the delays of all saves


class SlowSave(NamedTuple):
    """A save after `step` that took longer than the time until the next save was due."""

    step: int
    took_s: float
    period_s: float

    @property
    def words(self) -> str:
        """The measurement as one sentence."""
        took, period = format_seconds(self.took_s), format_seconds(self.period_s)
        return (
            f"the save after step {self.step:,} took {took}, but the next one was due after "
            f"{period}"
        )


class SaveRhythm:
    """Comparison of the time of each regular save with the training time until the next save."""

    def __init__(self, every_s: float | None) -> None:
        """Set the save interval in seconds; None if the spec gives it in steps.

        With an interval in seconds, a save is not due before the previous one is done.
        """
        self._every_s = every_s
        self._since_s: float | None = None
        self._late_s = 0.0
        self._found: SlowSave | None = None
        self._is_told = False

    def measure(self, *, is_regular: bool) -> float | None:
        """Return the seconds of training since the previous save, if both saves are regular.

        A save is not regular if a user has requested it, if it is for the best score, or at the end
        of the run. The result is None if a save is not regular.
        """
        return None if self._since_s is None or not is_regular else time.monotonic() - self._since_s

    def start_training_time(self, *, is_regular: bool) -> None:
        """Start to measure training time, when a save is done or continues in the background."""
        self._since_s = time.monotonic() if is_regular else None

    def compare(self, step: int, took_s: float, period_s: float | None) -> None:
        """Compare a save of `took_s` seconds with `period_s` and the interval; add the delay."""
        limits = [each for each in (period_s, self._every_s) if each is not None]
        if not limits or took_s <= min(limits):
            return
        self._late_s += took_s - min(limits)
        if self._late_s >= WORTH_TELLING_S:
            self._found = SlowSave(step, took_s, min(limits))

    def take(self) -> SlowSave | None:
        """Return a slow save if all delays together were longer than 2 s; None in later calls."""
        if self._found is None or self._is_told:
            return None
        self._is_told = True
        return self._found
