"""Measurement of the gradient noise in the steps of a run (`observe.noise`)."""

from __future__ import annotations

from torch import Tensor

from surefoot.components.stability.noise import GradientNoise
from surefoot.train.step.factors import Count
from surefoot.train.step.program import LiveUpdate, Observers, StepDone, StepInput, Totals


class NoiseObserver:
    """Observer that compares the gradient of the first microbatch with that of the whole batch."""

    def __init__(self, noise: GradientNoise) -> None:
        self._noise = noise
        self._first: tuple[float | Tensor, Count] = (0.0, 0.0)  # norm and item count

    def observe(self, observers: Observers) -> None:
        observers.microbatch_done.append(self._on_microbatch)
        observers.published.append(self._on_step)

    def _on_microbatch(
        self, update: LiveUpdate, given: StepInput, position: int, totals: Totals
    ) -> None:
        if position == 0:  # later passes add to these gradients
            self._first = update.guarded.norm(), next(iter(totals.values()))[1]

    def _on_step(self, done: StepDone) -> None:
        if not done.updates:
            return
        ((_, gradients, applied),) = done.updates
        norm, count = self._first
        # a microbatch in which no item counts has no mean
        if isinstance(count, Tensor) or count:
            share = count / next(iter(gradients.totals.values()))[1]
            part, sizes = norm * applied.factor / share, done.given.sizes
            assert applied.norm is not None
            self._noise.add(part**2, applied.norm**2, sizes[0], sum(sizes))
