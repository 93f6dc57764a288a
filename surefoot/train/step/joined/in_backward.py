"""Passes of an update whose optimizer step runs inside the backward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.components.optim.backward import backward
from surefoot.components.profiler.phases.clock import BACKWARD, OPTIMIZER
from surefoot.train.step.accumulate import EagerAccumulate
from surefoot.train.step.program import (
    NO_POINTS,
    Applied,
    Gradients,
    LiveUpdate,
    Points,
    StepInput,
    Totals,
    add_terms,
    can_apply,
)


@dataclass(frozen=True)
class AccumulateInBackward:
    """Passes of one microbatch, whose gradients are freed as soon as their weights have moved."""

    eager: EagerAccumulate
    points: Points = NO_POINTS

    def __call__(self, update: LiveUpdate, index: int, given: StepInput) -> Gradients:
        eager = self.eager
        assert update.in_backward is not None
        update.guarded.clear_gradients()
        division = eager.divide(update, given)
        (batch,) = given.batches
        with eager.observed, eager.collectives.gathering():
            eager.draws.seed(given.number, given.first, index)
            with eager.policy.context():
                loss = update.loss(eager.model, batch)
            factors = eager.factors_of(loss, division, given)
            totals: Totals = {}
            add_terms(totals, loss.terms)
            norm, was_applied = math.nan, can_apply(update, loss.terms)
            if was_applied:
                for observe in self.points.before_update:
                    observe()
                eager.clock.switch(BACKWARD)
                totals_of_terms = [term.total for term in loss.terms]
                norm = update.in_backward.step(lambda: backward(totals_of_terms, factors))
                eager.clock.switch(OPTIMIZER)
        return Gradients(totals, applied=Applied(norm, was_applied))
