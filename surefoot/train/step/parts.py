"""Parts that the steps of a run share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from surefoot.components.data.feed import Feed
from surefoot.components.optim.buffers import LiveBuffers
from surefoot.components.precision.policy import PLAIN, Policy
from surefoot.components.profiler.phases.clock import PhaseClock
from surefoot.contract.state import StepReport
from surefoot.contract.task import ResolvedTask
from surefoot.train.step.accumulate import EagerAccumulate, StepDraws
from surefoot.train.step.apply import GuardedApply
from surefoot.train.step.collectives import SINGLE_RANK, Collectives
from surefoot.train.step.eager import EagerStep
from surefoot.train.step.factors import LossFactors
from surefoot.train.step.hooks import GradientHooks
from surefoot.train.step.inputs import InputReader
from surefoot.train.step.observed import Context, FirstStepRecord, RecordedStep
from surefoot.train.step.program import (
    NO_POINTS,
    Accumulate,
    LiveUpdate,
    Observers,
    Points,
    StepProgram,
)

if TYPE_CHECKING:
    from surefoot.train.step.joined.whole import WholeStep


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


Make = Callable[["StepParts", Points], StepProgram]


def make_program(parts: StepParts, points: Points) -> StepProgram:
    """Return the program that takes the steps of a run: the first one of `KINDS` that applies."""
    return next(make for applies, make in KINDS if applies(parts))(parts, points)


def make_passes(parts: StepParts, points: Points) -> EagerAccumulate:
    """Return the passes that call the loss of the task for one microbatch after another."""
    return EagerAccumulate(
        parts.model,
        parts.clock,
        parts.policy,
        parts.collectives,
        parts.reader,
        parts.factors,
        parts.draws,
        parts.hooks,
        has_one_update=len(parts.updates) == 1,
        points=points,
    )


def make_apply(parts: StepParts, points: Points) -> GuardedApply:
    """Return the optimizer step, which is skipped if a number is not finite."""
    scaler = parts.policy.scaler
    return GuardedApply(parts.clock, parts.collectives, parts.factors, scaler, points)


def _make_eager(parts: StepParts, points: Points) -> StepProgram:
    passes = make_passes(parts, points)
    return _record_first(parts, points, passes, passes.within)


def _make_in_backward(parts: StepParts, points: Points) -> StepProgram:
    from surefoot.train.step.joined.in_backward import AccumulateInBackward

    passes = make_passes(parts, points)
    return _record_first(
        parts,
        points,
        AccumulateInBackward(passes, points),
        lambda context: AccumulateInBackward(passes.within(context), points),
    )


def _make_as_graph(parts: StepParts, points: Points) -> StepProgram:
    from surefoot.train.step.joined.one_graph import AccumulateAsGraph

    assert parts.whole is not None
    passes = make_passes(parts, points)
    graph = AccumulateAsGraph(passes, parts.whole, parts.record, points)
    timed = replace(points, published=(graph.on_published, *points.published))
    return _record_first(parts, timed, graph, passes.within, graph.is_graph)


def _record_first(
    parts: StepParts,
    points: Points,
    plain: Accumulate,
    observed: Callable[[Context], Accumulate],
    is_graph: Callable[[int], bool] = lambda number: False,
) -> StepProgram:
    """Return a program whose first step is recorded: its passes run in that context."""

    def make(accumulate: Accumulate) -> StepProgram:
        return EagerStep(
            parts.updates,
            accumulate,
            make_apply(parts, points),
            clock=parts.clock,
            collectives=parts.collectives,
            buffers=parts.buffers,
            scaler=parts.policy.scaler,
            points=points,
        )

    return RecordedStep(
        make(plain),
        lambda context: make(observed(context)),
        parts.record,
        eager=parts.eager,
        is_graph=is_graph,
    )


KINDS: tuple[tuple[Callable[[StepParts], bool], Make], ...] = (
    (lambda parts: parts.whole is not None, _make_as_graph),
    (lambda parts: any(each.in_backward for each in parts.updates), _make_in_backward),
    (lambda parts: True, _make_eager),
)
