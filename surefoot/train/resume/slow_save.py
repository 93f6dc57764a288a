"""Detection of saves that take longer than the time between them; reported once.

Training then waits for the disk.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from surefoot.core.units import format_seconds

WORTH_TELLING_S = 2.0  # that the saves of a run were late by, in all


class SlowSave(NamedTuple):
    """A save after `step` that took longer than the time to the next one."""

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
    """Comparison of each regular save's time with the training time before the next save."""

    def __init__(self, every_s: float | None) -> None:
        """Set the save interval `every_s` in seconds, None if it is given in steps.

        With a time, a save is not due before the previous one is done.
        """
        self._every_s = every_s
        self._since_s: float | None = None
        self._late_s = 0.0
        self._found: SlowSave | None = None
        self._is_told = False

    def measure(self, *, is_regular: bool) -> float | None:
        """Return the seconds since the previous save, if both are regular.

        A save that a user asked for, that of the best score and the last one are not regular.
        """
        return None if self._since_s is None or not is_regular else time.monotonic() - self._since_s

    def start_training_time(self, *, is_regular: bool) -> None:
        """Start the time of training, when the save is done or is written in the background."""
        self._since_s = time.monotonic() if is_regular else None

    def compare(self, step: int, took_s: float, period_s: float | None) -> None:
        """Add the save after `step` if it took longer than `period_s` or the spec's interval."""
        limits = [each for each in (period_s, self._every_s) if each is not None]
        if not limits or took_s <= min(limits):
            return
        self._late_s += took_s - min(limits)
        if self._late_s >= WORTH_TELLING_S:
            self._found = SlowSave(step, took_s, min(limits))

    def take(self) -> SlowSave | None:
        """Return a slow save, once, if all of them together cost more than two seconds."""
        if self._found is None or self._is_told:
            return None
        self._is_told = True
        return self._found
