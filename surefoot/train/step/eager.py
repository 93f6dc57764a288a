"""A training step: for each update, passes over the microbatches and an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from surefoot.components.optim.buffers import LiveBuffers
from surefoot.components.profiler.phases.clock import DATA, FORWARD, PhaseClock
from surefoot.contract.state import Scaling, StepReport
from surefoot.train.step.collectives import Collectives
from surefoot.train.step.program import (
    NO_POINTS,
    Accumulate,
    Apply,
    LiveUpdate,
    Points,
    StepInput,
    UpdateDone,
    join_updates,
    make_report,
)

if TYPE_CHECKING:
    from surefoot.components.precision.scaler import LossScaler


class EagerStep:
    """Step that calls its two parts, `accumulate` and `apply`, for each update that is due.

    A step that is skipped leaves weights, optimizer state, buffers and attributes of the model
    unchanged.
    """

    def __init__(
        self,
        updates: Sequence[LiveUpdate],
        accumulate: Accumulate,
        apply: Apply,
        *,
        clock: PhaseClock,
        collectives: Collectives,
        buffers: LiveBuffers,
        scaler: LossScaler | None = None,
        points: Points = NO_POINTS,
    ) -> None:
        self._updates, self._accumulate, self._apply = updates, accumulate, apply
        self._clock, self._collectives, self._buffers = clock, collectives, buffers
        self._scaler, self._points = scaler, points
        self._names = [update.name for update in updates]

    def __call__(self, given: StepInput) -> StepReport:
        if self._points.batch_read:
            self._clock.switch(DATA)
            for observe in self._points.batch_read:
                for batch in given.batches:
                    observe(batch)
            self._clock.switch(FORWARD)
        self._buffers.keep()
        self._collectives.begin(given)
        done: list[UpdateDone] = []
        for index, update in enumerate(self._updates):
            if given.number % update.every:
                continue
            if done:
                self._collectives.begin_next_update()
            gradients = self._accumulate(update, index, given)
            applied = gradients.applied or self._apply(update, index, gradients)
            done.append(UpdateDone(update, gradients, applied))
        return self._publish(given, done)

    def _publish(self, given: StepInput, updates: list[UpdateDone]) -> StepReport:
        """Finish a step after its updates, and return its report."""
        done = join_updates(given, updates)
        self._collectives.end(done, self._buffers)
        for observe in self._points.published:
            observe(done)
        self._clock.end_step(given.number)
        report = make_report(done, self._collectives.end_step(given), self._names)
        if self._scaler is not None:
            if updates:  # they share one loss scale
                self._scaler.update(done.overflowed)
            report.scaling = Scaling(self._scaler.scale, done.overflowed)
        return report
