"""Forward and backward passes of an update over the microbatches of a step.

The gradient of a step is the sum over every item of its global batch, divided once by the global
count. If counts are known before the backward pass, each term is divided by its count first. Else a
single term is scaled by a power of two near 1/count (exact); the optimizer step includes the rest.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.components.data.feed import Feed
from surefoot.components.data.order import derive, mix
from surefoot.components.optim.backward import backward
from surefoot.components.precision.policy import Policy
from surefoot.components.profiler.phases.clock import BACKWARD, FORWARD, PhaseClock
from surefoot.contract.state import leaf_of
from surefoot.contract.task import Loss
from surefoot.runtime.attributes.snapshot import AttributeSnapshot
from surefoot.runtime.comm.gathered import Gathering
from surefoot.train.step.collectives import NOT_GATHERING, Collectives, NotGathering
from surefoot.train.step.factors import Counts, LossFactors, check_gathered, check_splittable
from surefoot.train.step.hooks import GradientHooks
from surefoot.train.step.inputs import InputReader
from surefoot.train.step.program import (
    NO_POINTS,
    Gradients,
    LiveUpdate,
    Points,
    StepInput,
    Totals,
    add_terms,
    run_backward,
)


class StepDraws:
    """Random generators that are seeded before each forward pass of a step.

    NumPy and Python are seeded only on several ranks (`splits`) or with several microbatches, where
    any number of ranks must draw the same. Otherwise checkpoints hold their states, and seeding
    would take a tenth of a step of a small model.
    """

    def __init__(self, seed: int, device: torch.device, feed: Feed, *, splits: bool) -> None:
        self._key, self._feed, self._splits = derive(seed, 3), feed, splits
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])

    def seed(self, number: int, microbatch: int, update: int) -> None:
        """Seed the draws of a pass: of step `number`, and of `microbatch` among those of all ranks.

        `update` is the index of the update in the step.
        """
        key = mix(self._key ^ (number << 24 | microbatch << 8 | update)) >> 1
        for generator in self._generators:
            generator.manual_seed(key)
        if self._splits or self._feed.is_cut:
            np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the masks of wav2vec 2.0 are drawn so
            random.seed(key)


_UNOBSERVED: AbstractContextManager[None] = nullcontext()


class Division(NamedTuple):
    """Division of the losses of an update in a step.

    Args:
        counts: Item counts of the global batch; None if only the loss can give them.
        scale: Power of two that replaces 1 / counts if they are not known.
        is_split: Whether the batch is split over microbatches or ranks.
        inputs: Tensors that get gradients; None for all.
    """

    counts: Counts
    scale: float | None
    is_split: bool
    inputs: list[Tensor] | None


UNDIVIDED = Division(None, None, is_split=False, inputs=None)


@dataclass(frozen=True)
class EagerAccumulate:
    """Passes that call the loss of the task for one microbatch after another.

    `observed` is a context for the passes, such as a record of their operators.
    """

    model: nn.Module
    clock: PhaseClock
    policy: Policy
    collectives: Collectives
    reader: InputReader
    factors: LossFactors
    draws: StepDraws
    hooks: GradientHooks
    has_one_update: bool = True
    points: Points = NO_POINTS
    observed: AbstractContextManager[object] = _UNOBSERVED

    def within(self, observed: AbstractContextManager[object]) -> EagerAccumulate:
        return replace(self, observed=observed)

    def __call__(self, update: LiveUpdate, index: int, given: StepInput) -> Gradients:
        if index:
            self.clock.switch(FORWARD)
        update.guarded.clear_gradients()
        division = self.divide(update, given)
        totals: Totals = {}
        num_idle = self.collectives.begin_passes(index, given)
        if division.is_split or self.hooks.is_split:
            self.hooks.begin(is_split=division.is_split)
        if self.is_plain:
            has_run = self._run(update, index, given, division, totals, NOT_GATHERING, num_idle)
        else:
            with self.observed, self.collectives.gathering() as gathered:
                has_run = self._run(update, index, given, division, totals, gathered, num_idle)
            if num_idle:
                self._run_placeholder_passes(update, index, given, num_idle)
            totals = self.collectives.reduce(index, totals)
            if gathered.was_used and division.counts is not None:
                check_gathered(division.counts, totals)
        for observe in self.points.gradients_reduced:
            observe(update, totals)
        return Gradients(totals, division.scale, is_constant=bool(given.batches) and not has_run)

    @functools.cached_property
    def is_plain(self) -> bool:
        """True for a single rank whose passes are not observed."""
        return not self.collectives.splits and self.observed is _UNOBSERVED

    def divide(self, update: LiveUpdate, given: StepInput) -> Division:
        """Return how the losses of `update` are divided in this step."""
        is_split = len(given.batches) > 1 or self.collectives.splits
        if not is_split and self.has_one_update:
            return UNDIVIDED
        counts = self.factors.known_counts(given.batches, self.collectives, update.name)
        scale = inputs = None
        if is_split and counts is None:  # a power of two is exact
            num_samples = self.collectives.scaled_by(given)
            scale = 2.0 ** -round(math.log2(max(1, num_samples)))
        if not self.has_one_update:  # a GAN's generator must not leave gradients in the critic
            inputs = [leaf_of(each) for each in update.guarded.parameters if each.requires_grad]
        return Division(counts, scale, is_split, inputs)

    def _run(
        self,
        update: LiveUpdate,
        index: int,
        given: StepInput,
        division: Division,
        totals: Totals,
        gathered: Gathering | NotGathering,
        num_idle: int,
    ) -> bool:
        """Run the forward and backward pass of each microbatch; add its terms to `totals`.

        Returns False if the losses of all microbatches are constants.
        """
        has_run = False
        clock, collectives, last = self.clock, self.collectives, len(given.batches) - 1
        for position, batch in enumerate(given.batches):
            if position:
                clock.switch(FORWARD)
            collectives.begin_pass(given.first + position)
            self.draws.seed(given.number, given.first + position, index)
            with self.policy.context():
                loss = update.loss(self.model, batch)
            if division.is_split:
                self._begin_split_pass(update, loss, division, given, gathered)
            factors = self.factors_of(loss, division, given)
            clock.switch(BACKWARD)
            if position == last and not num_idle:
                collectives.begin_last_backward(index)
            has_run |= run_backward(
                loss.terms, factors, division.inputs, is_even=collectives.is_even
            )
            add_terms(totals, loss.terms)
            collectives.end_pass(index, given.first + position + 1, totals)
            for observe in self.points.microbatch_done:
                observe(update, given, position, totals)
        return has_run

    def factors_of(self, loss: Loss, division: Division, given: StepInput) -> list[Tensor]:
        """Return the gradient of the total of each term, with which its backward pass starts."""
        counts, scale, cut = division.counts, division.scale, given.num_microbatches
        return [self.factors.of(term, counts, scale, cut) for term in loss.terms]

    def _begin_split_pass(
        self,
        update: LiveUpdate,
        loss: Loss,
        division: Division,
        given: StepInput,
        gathered: Gathering | NotGathering,
    ) -> None:
        """Check that the loss may be split, and prepare gradient hooks for its backward pass."""
        joins = gathered.was_used and given.num_microbatches == self.collectives.size
        check_splittable(
            update.name, loss, division.counts is not None, self.reader.feed, joins_ranks=joins
        )
        leaves = [leaf_of(each) for each in update.guarded.parameters]
        self.hooks.begin_pass(
            leaves,
            loss.terms,
            lambda term: self.factors.divisor(term, division.counts, division.scale),
            # stages 2 and 3 reduce the gradients of each pass separately
            adds=not self.collectives.is_even,
        )

    def _run_placeholder_passes(
        self, update: LiveUpdate, index: int, given: StepInput, count: int
    ) -> None:
        """Run passes with zero gradients, since other ranks still gather weights from all ranks."""
        batch = given.batches[-1] if given.batches else self.reader.read_again(1).batches[0]
        held = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        attributes = AttributeSnapshot(self.model)
        self.hooks.is_on = False
        for left in reversed(range(count)):
            with self.policy.context():
                terms = update.loss(self.model, batch).terms
            if not left:
                self.collectives.begin_last_backward(index)
            backward(
                [term.total for term in terms], [torch.zeros_like(term.total) for term in terms]
            )
        self.hooks.is_on = True
        with torch.no_grad():
            for buffer, kept in held:
                buffer.copy_(kept)
        attributes.put_back()

    def repeat(self, updates: Sequence[LiveUpdate], given: StepInput) -> None:
        """Repeat the passes of a step without its update, to observe it; unseeded draws differ."""
        for index, update in enumerate(updates):
            division = self.divide(update, given)
            for position, batch in enumerate(given.batches):
                self.draws.seed(given.number, position, index)
                with self.policy.context():
                    loss = update.loss(self.model, batch)
                factors = self.factors_of(loss, division._replace(scale=None), given)
                backward([term.total for term in loss.terms], factors)
            update.guarded.clear_gradients()
