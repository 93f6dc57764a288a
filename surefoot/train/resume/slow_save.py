"""Saves that take longer than the time from one to the next: the training then waits for the disk, which is said once."""

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
        """What was measured, as one sentence."""
        took, period = format_seconds(self.took_s), format_seconds(self.period_s)
        return f"the save after step {self.step:,} took {took}, and the next one was due after {period}"


class SaveRhythm:
    """Compares the time of each regular save with the time of training that follows it before the next one."""

    def __init__(self, every_s: float | None) -> None:
        """`every_s` is how often a run is saved, where that is a time: a save is then not due before the one before it is done."""
        self._every_s = every_s
        self._since_s: float | None = None
        self._late_s = 0.0
        self._found: SlowSave | None = None
        self._is_told = False

    def measure(self, *, is_regular: bool) -> float | None:
        """The seconds since the save before, if both are regular: none of them was asked for, is the best, or the last."""
        return None if self._since_s is None or not is_regular else time.monotonic() - self._since_s

    def resumed(self, *, is_regular: bool) -> None:
        """The training goes on: the save is done, or is written beside it."""
        self._since_s = time.monotonic() if is_regular else None

    def compare(self, step: int, took_s: float, period_s: float | None) -> None:
        """Add a save after `step` that took longer than `period_s`, or than the spec leaves between two."""
        limits = [each for each in (period_s, self._every_s) if each is not None]
        if not limits or took_s <= min(limits):
            return
        self._late_s += took_s - min(limits)
        if self._late_s >= WORTH_TELLING_S:
            self._found = SlowSave(step, took_s, min(limits))

    def take(self) -> SlowSave | None:
        """A slow save, once, when all of them together cost more than two seconds."""
        if self._found is None or self._is_told:
            return None
        self._is_told = True
        return self._found
