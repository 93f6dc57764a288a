"""Ways to take a step; a new one is a file and a line in `KINDS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from surefoot.train.step.accumulate import EagerAccumulate
from surefoot.train.step.apply import GuardedApply
from surefoot.train.step.eager import EagerStep
from surefoot.train.step.observed import Context, RecordedStep
from surefoot.train.step.program import Accumulate, Points, StepProgram

if TYPE_CHECKING:
    from surefoot.train.step.parts import StepParts

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
    from surefoot.train.step.in_backward import AccumulateInBackward

    passes = make_passes(parts, points)
    return _record_first(
        parts,
        points,
        AccumulateInBackward(passes, points),
        lambda context: AccumulateInBackward(passes.within(context), points),
    )


def _make_as_graph(parts: StepParts, points: Points) -> StepProgram:
    from surefoot.train.step.one_graph import AccumulateAsGraph

    assert parts.whole is not None
    passes = make_passes(parts, points)
    graph = AccumulateAsGraph(passes, parts.whole, parts.record, points)
    timed = replace(points, published=(*points.published, graph.see_published))
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
