"""Trouble of saves with the disk: it is full, or slower than the time between two saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from surefoot.components import checkpoint
from surefoot.contract.manifest import Manifest
from surefoot.core.errors import StorageError
from surefoot.core.units import format_seconds
from surefoot.runtime.comm.group import ALONE, Group


def list_steps(steps: list[int]) -> str:
    """Return `step 20`, or `steps 20, 40`."""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(f'{step:,}' for step in steps)}"


class RoomMaker:
    """Writer of checkpoints that deletes older ones and retries if the disk is full."""

    def __init__(
        self,
        run: Path,
        *,
        every: int | None = None,
        every_s: float | None = None,
        keep_best: int = 0,
        group: Group = ALONE,
    ) -> None:
        """Set which checkpoints are never deleted, and the ranks that write together.

        These are the best `keep_best`, multiples of `every` steps, and the first after each
        `every_s` seconds of training.
        """
        self._run, self._every, self._every_s, self._keep_best, self._group = (
            run,
            every,
            every_s,
            keep_best,
            group,
        )
        self._deleted: list[int] = []

    def write(self, write: Callable[[], Manifest]) -> Manifest:
        """Return what `write` returns; if the disk is full, delete checkpoints and call it again.

        Raises the StorageError of `write` if the disk is not full or nothing can be deleted.
        """
        try:
            return write()
        except StorageError as error:
            if not error.is_full or not self._has_made_room():
                raise
        return write()

    def _has_made_room(self) -> bool:
        deleted: list[int] = []
        if self._group.is_first:
            deleted = checkpoint.make_room(
                self._run, every=self._every, every_s=self._every_s, keep_best=self._keep_best
            )
            self._deleted += deleted
        return (
            bool(deleted)
            if self._group.is_alone
            else self._group.most([float(bool(deleted))])[0] > 0
        )

    def take_deleted(self) -> list[int]:
        """Return the steps whose checkpoints were deleted since the last call."""
        deleted, self._deleted = self._deleted, []
        return deleted


class Patience:
    """Time limit for a run in which all saves fail."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        # the first step whose save failed since the last successful one, and the time
        self._first: tuple[int, float] | None = None
        self._ending: StorageError | None = None
        self._mend = "repair the disk"

    def hint_restart(self, saved_step: int) -> str:
        """Return the hint of an error about failed saves.

        `saved_step` is the step of the newest checkpoint, 0 without one.
        """
        then = (
            "it resumes after the newest checkpoint"
            if saved_step
            else "it starts again from the beginning, because there is no checkpoint"
        )
        return f"{self._mend}, and run the same command again: {then}"

    def on_saved(self) -> None:
        """Record that a save has succeeded, which restarts the time limit."""
        self._first = None

    def is_over(self, error: StorageError) -> bool:
        """Return whether `error` is the error by which this object ended the run."""
        return error is self._ending

    def on_failed(self, error: StorageError, step: int, saved_step: int) -> None:
        """Record a failed save. Raises StorageError if saves have failed for longer than the limit.

        `saved_step` is the step of the newest checkpoint, 0 without one.
        """
        if error is self._ending:
            raise error
        self._first = self._first or (step, time.monotonic())
        self._mend = error.hint or self._mend
        first, since_s = self._first
        if self._limit_s is None or time.monotonic() - since_s < self._limit_s:
            return
        self._ending = StorageError(
            f"no checkpoint could be written for {format_seconds(self._limit_s)}, from step "
            f"{first:,} to step {step:,}: {error.message}",
            hint=f"{self.hint_restart(saved_step)}; checkpoint.max_unsaved sets the time limit",
        )
        raise self._ending from error


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
