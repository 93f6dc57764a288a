"""Passes and optimizer step of an update as one compiled graph, from the sixth step on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from surefoot.components.profiler.phases.clock import FORWARD
from surefoot.train.step.accumulate import EagerAccumulate
from surefoot.train.step.program import (
    EAGER_STEPS,
    Applied,
    Gradients,
    LiveUpdate,
    Points,
    StepDone,
    StepInput,
    Totals,
    add_terms,
)

if TYPE_CHECKING:
    from surefoot.train.step.joined.whole import WholeStep
    from surefoot.train.step.observed import FirstStepRecord


class AccumulateAsGraph:
    """Passes of one microbatch that run as one graph together with the optimizer step.

    The first steps of a run, and all steps after a failed compilation, run in order. The time of
    each step after the first of the process is reported to the plan of the compiler.
    """

    def __init__(
        self, eager: EagerAccumulate, whole: WholeStep, record: FirstStepRecord, points: Points
    ) -> None:
        self._eager, self._whole, self._record, self._points = eager, whole, record, points
        self._begun_s = 0.0

    def __call__(self, update: LiveUpdate, index: int, given: StepInput) -> Gradients:
        self._begun_s = time.perf_counter()
        if not self.is_graph(given.number):
            return self._eager(update, index, given)
        update.guarded.clear_gradients()
        for observe in self._points.before_update:
            observe()
        self._eager.clock.switch(FORWARD)  # the graph is timed as forward pass
        self._eager.draws.seed(given.number, 0, 0)
        done = self._whole(given.batches[0])
        if done is None:
            return self._eager(update, index, given)
        terms, norm, was_applied = done
        totals: Totals = {}
        add_terms(totals, terms)
        self._eager.factors.mean_factor(totals, None)  # raises for an invalid count
        return Gradients(totals, applied=Applied(norm, was_applied))

    def is_graph(self, number: int) -> bool:
        """Return whether step `number` runs as one compiled graph."""
        if not self._whole.is_on:
            return False
        return not (self._record.is_on and number <= EAGER_STEPS)

    def on_published(self, done: StepDone) -> None:
        """Report the time of a step; the first one of the process is observed, and so slower."""
        if done.updates and not self._record.is_first:
            plan = self._whole.plan
            plan.pace.add(time.perf_counter() - self._begun_s, is_compiled=plan.was_called)
