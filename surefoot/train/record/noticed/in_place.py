"""Check of the first steps of an attempt for in-place writes into the memory of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from surefoot.components.data import in_place
from surefoot.components.stability.guard import GuardFault
from surefoot.contract.state import StepReport
from surefoot.contract.task import Batch
from surefoot.train.assemble import Assembly
from surefoot.train.record.telling import Telling
from surefoot.train.step.program import Observers

NUM_WATCHED = 2  # steps; the first batch of an iterable may be a copy from the checks


@final
class WatchedForWrites:
    """Step function that reports in-place writes into the data in the first two steps.

    The check before the run, in evaluation mode, does not find all of these writes.
    """

    def __init__(
        self,
        step: Callable[[int], StepReport],
        assembly: Assembly,
        telling: Telling,
        observers: Observers,
    ) -> None:
        self._step, self._telling, self._observers = step, telling, observers
        self._what = in_place.describe("the forward pass")
        is_known = any(warning.startswith(self._what) for warning in assembly.warnings)
        self._lent = in_place.InPlaceWriteCheck(assembly.feed.source)
        self._num_left, self._is_watched = 0 if is_known else NUM_WATCHED, False
        if self._num_left:
            observers.batch_read.append(self._on_batch)

    def _on_batch(self, batch: Batch) -> None:
        if self._is_watched:
            self._lent.lend(batch)

    def __call__(self, number: int) -> StepReport:
        if not self._num_left:
            return self._step(number)
        self._num_left -= 1
        is_last, self._is_watched = not self._num_left, True
        try:
            report = self._step(number)
        finally:
            self._is_watched = False
            if is_last:
                self._observers.batch_read.remove(self._on_batch)
        if self._lent.was_data_changed():
            self._telling.fault(GuardFault(number, "changed-data", in_place.HINT, self._what))
        return report
