"""Parts that the steps of a run share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from surefoot.components.data.feed import Feed
from surefoot.components.optim.buffers import LiveBuffers
from surefoot.components.precision.policy import PLAIN, Policy
from surefoot.components.profiler.phases.clock import PhaseClock
from surefoot.contract.state import StepReport
from surefoot.contract.task import ResolvedTask
from surefoot.train.step.collectives import SINGLE_RANK, Collectives
from surefoot.train.step.draws import StepDraws
from surefoot.train.step.factors import LossFactors
from surefoot.train.step.hooks import GradientHooks
from surefoot.train.step.inputs import InputReader
from surefoot.train.step.kinds import make_passes, make_program
from surefoot.train.step.observed import FirstStepRecord
from surefoot.train.step.program import NO_POINTS, Observers
from surefoot.train.step.update import LiveUpdate

if TYPE_CHECKING:
    from surefoot.train.step.whole import WholeStep


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Objects that the steps of a run share, whatever program takes them."""

    model: Any
    updates: Sequence[LiveUpdate]
    policy: Policy
    clock: PhaseClock
    collectives: Collectives
    reader: InputReader
    buffers: LiveBuffers
    hooks: GradientHooks
    factors: LossFactors
    draws: StepDraws
    record: FirstStepRecord
    whole: WholeStep | None = None  # set if the step is one graph
    # context without compilation, for steps whose operators are observed
    eager: Callable[[], AbstractContextManager[None]] = nullcontext
    observers: Observers = field(default_factory=Observers)

    def step_function(self, observers: Observers | None = None) -> Callable[[int], StepReport]:
        """Return a function that takes the step with the given number.

        `observers` replace those of the parts, of which they may be an extended copy.
        """
        program = make_program(self, (observers or self.observers).points())
        read = self.reader.read
        return lambda number: program(read(number))

    def repeat(self, number: int) -> None:
        """Repeat the passes of a step without its update, to observe it; unseeded draws differ."""
        given = self.reader.read_again(number)
        self.buffers.keep()
        make_passes(self, NO_POINTS).repeat(self.updates, given)
        self.buffers.restore()


def make_parts(
    *,
    model: Any,
    task: ResolvedTask,
    feed: Feed,
    updates: Sequence[LiveUpdate],
    seed: int,
    device: torch.device,
    policy: Policy = PLAIN,
    make_collectives: Callable[[PhaseClock], Collectives] = lambda clock: SINGLE_RANK,
) -> StepParts:
    """Return the parts of steps of `task` on the samples of `feed`."""
    clock, buffers, hooks = PhaseClock(device), LiveBuffers(model), GradientHooks(model)
    collectives = make_collectives(clock)
    return StepParts(
        model=model,
        updates=updates,
        policy=policy,
        clock=clock,
        collectives=collectives,
        reader=InputReader(
            feed, task, seed=seed, device=device, clock=clock, collectives=collectives
        ),
        buffers=buffers,
        hooks=hooks,
        factors=LossFactors(task, device, policy.scaler),
        draws=StepDraws(seed, device, feed, splits=collectives.splits),
        record=FirstStepRecord(model, updates, tf32=policy.compute == "tf32"),
    )
