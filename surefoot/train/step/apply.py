"""Optimizer step of an update: the factor of its gradients, clipping, and the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from surefoot.components.profiler.phases.clock import OPTIMIZER, PhaseClock
from surefoot.train.step.collectives import Collectives
from surefoot.train.step.factors import LossFactors
from surefoot.train.step.program import (
    NO_POINTS,
    Applied,
    Gradients,
    LiveUpdate,
    Points,
    check_has_gradient,
    has_overflowed,
)

if TYPE_CHECKING:
    from surefoot.components.precision.scaler import LossScaler


@dataclass(frozen=True)
class GuardedApply:
    """Optimizer step that is skipped if a gradient or a loss is not finite."""

    clock: PhaseClock
    collectives: Collectives
    factors: LossFactors
    scaler: LossScaler | None
    points: Points = NO_POINTS

    def __call__(self, update: LiveUpdate, index: int, gradients: Gradients) -> Applied:
        factor = self._factor(update, gradients)
        self.collectives.finish(index, factor)
        if gradients.is_constant:
            check_has_gradient(update, gradients.totals)
        for observe in self.points.before_update:
            observe()
        self.clock.switch(OPTIMIZER)
        norm, applied = update.guarded.step_if_finite(factor)
        overflowed = self.scaler is not None and has_overflowed(norm, factor)
        return Applied(norm, applied, overflowed, factor)

    def _factor(self, update: LiveUpdate, gradients: Gradients) -> float | Tensor:
        """Return the factor of the gradient sums; NaN, to skip the step, for a non-finite loss."""
        factor = self.factors.mean_factor(gradients.totals, gradients.scale)
        totals = [total for total, _, _ in gradients.totals.values()]
        if update.guarded.on_device:
            # adds 0, or NaN if a loss is non-finite
            factor = factor + sum(total * 0.0 for total in totals)
        elif not all(math.isfinite(total.item()) for total in totals):
            factor = math.nan  # a non-finite loss skips the step even if the gradient is finite
        return factor if self.scaler is None else factor / self.scaler.scale
