"""Interfaces of a training step: its input and result, its two parts, and its five points.

A step program takes the batches of a step and returns its report. It calls two parts for each
update: `Accumulate` runs the forward and backward passes, and `Apply` runs the optimizer. A
pipeline, a compiled step or a foreign engine replaces one of them, or the whole program. Observers
are called at five points and change nothing that is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from surefoot.components.optim.backward import backward
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.state import StepReport, learning_rate_of
from surefoot.contract.task import Batch, Loss, Term
from surefoot.core.errors import TaskError
from surefoot.train.step.factors import Count, check_count

if TYPE_CHECKING:
    from surefoot.components.optim.in_backward import UpdateInBackward

CONSTANT_HINT = "return a total that depends on the model for such a batch too: 0.0 * output.sum()"
Totals = dict[str, tuple[Tensor, Count, float]]  # total, count, weight by term


@dataclass(frozen=True)
class LiveUpdate:
    """An `Update` of the task: its loss, and the optimizers that apply its gradients."""

    name: str
    loss: Callable[[Any, Batch], Loss]
    guarded: GuardedUpdate
    every: int = 1
    in_backward: UpdateInBackward | None = None  # if set, the backward pass updates


def has_overflowed(norm: float | Tensor, factor: float | Tensor) -> bool | Tensor:
    """Return whether gradients overflowed: they are non-finite although the losses are finite."""
    if isinstance(norm, Tensor):
        return ~torch.isfinite(norm) & torch.isfinite(torch.as_tensor(factor))
    return not math.isfinite(norm) and math.isfinite(float(factor))


def run_backward(
    terms: tuple[Term, ...], factors: list[Tensor], inputs: list[Tensor] | None, *, is_even: bool
) -> bool:
    """Run the backward pass of all terms; return False if all of them are constants.

    With `is_even`, all ranks need equal numbers of backward passes. A TaskError is raised if all
    terms are constants.
    """
    has_run = backward([term.total for term in terms], factors, inputs)
    if is_even and not has_run:
        raise TaskError(
            "the loss of a batch is a constant, and stages 2 and 3 gather weights in the backward "
            "pass of every rank",
            hint=CONSTANT_HINT,
        )
    return has_run


def can_apply(update: LiveUpdate, terms: tuple[Term, ...]) -> bool:
    """Return whether a loss counts items and is finite, before a backward pass that updates.

    Raises TaskError for an invalid count, and for a loss that counts items but is a constant.
    """
    for term in terms:
        check_count(term.name, term.count)
    if not any(float(term.count) for term in terms):
        return False
    if not any(term.total.requires_grad for term in terms):
        raise _constant(update.name)
    return all(math.isfinite(term.total.item()) for term in terms)


def check_has_gradient(update: LiveUpdate, totals: Totals) -> None:
    """Raise TaskError if an update counts items in a step, but no parameter has a gradient."""
    has_items = any(float(count) for _, count, _ in totals.values())
    if has_items and all(each.grad is None for each in update.guarded.parameters):
        raise _constant(update.name)


def _constant(name: str) -> TaskError:
    return TaskError(
        f"the loss of update {name} has no gradient: all of its terms are constants",
        hint=CONSTANT_HINT,
    )


def add_terms(into: Totals, terms: tuple[Term, ...]) -> None:
    """Add the terms of a microbatch to the totals, counts and weights of `into`."""
    for term in terms:
        total = term.total.detach()
        count: Count = term.count
        if term.name in into:
            total, count = into[term.name][0] + total, into[term.name][1] + count
        into[term.name] = (total, count, term.weight)


# of a run: the first is observed, the others are the baseline for the time of a compiled step
EAGER_STEPS = 5


class StepInput(NamedTuple):
    """Batches of step `number` for this rank, on the device of the model.

    Args:
        number: Number of the step, from 1.
        epoch: Number of epochs, with fraction, that are read after the step.
        batches: One batch per microbatch of this rank.
        first: Index of this rank's first microbatch among the microbatches of all ranks.
        num_microbatches: Number of microbatches on all ranks.
        sizes: Number of samples of each batch; 1 where the source does not know it.
        num_samples: Number of samples of this rank.
        is_sized: Whether the source knows the number of samples of each batch.
        num_drawn: Number of samples drawn for the step on all ranks, readable or not.
        waiting_s: Seconds that the step waited for its batches.
    """

    number: int
    epoch: float
    batches: list[Batch]
    first: int
    num_microbatches: int
    sizes: list[int]
    num_samples: int
    is_sized: bool
    num_drawn: int
    waiting_s: float


class Applied(NamedTuple):
    """Result of an optimizer step.

    Args:
        norm: Norm of the mean gradient before clipping; a tensor if it is still on the device.
        was_applied: Whether the weights have changed; false for non-finite gradients.
        overflowed: Whether fp16 gradients overflowed because of the loss scale.
        factor: Number that turned the gradient sums into means.
    """

    norm: float | Tensor | None
    was_applied: bool | Tensor
    overflowed: bool | Tensor = False
    factor: float | Tensor = 1.0


class Gradients(NamedTuple):
    """Result of the forward and backward passes of an update.

    Args:
        totals: Total, count and weight of each loss term, summed over all microbatches and ranks.
        scale: Power of two by which the gradient sums were multiplied; None if they are means.
        applied: Result of the optimizer step, if the passes have run it too.
        is_constant: Whether the losses of all microbatches of this rank are constants.
    """

    totals: Totals
    scale: float | None = None
    applied: Applied | None = None
    is_constant: bool = False


class UpdateDone(NamedTuple):
    """An update of a step that has run."""

    update: LiveUpdate
    gradients: Gradients
    applied: Applied


class StepDone(NamedTuple):
    """A step whose weights are final.

    Args:
        given: Input of the step.
        updates: Updates that have run in it.
        was_applied: Whether the weights have changed; true if no update was due.
        overflowed: Whether fp16 gradients overflowed because of the loss scale.
    """

    given: StepInput
    updates: list[UpdateDone]
    was_applied: bool | Tensor
    overflowed: bool | Tensor


class Accumulate(Protocol):
    """Forward and backward passes of one update over the microbatches of a step."""

    def __call__(self, update: LiveUpdate, index: int, given: StepInput) -> Gradients: ...


class Apply(Protocol):
    """Optimizer step of one update: mean gradients, clipping, weights."""

    def __call__(self, update: LiveUpdate, index: int, gradients: Gradients) -> Applied: ...


class StepProgram(Protocol):
    """Training step: it takes the batches of a step and returns its report."""

    def __call__(self, given: StepInput) -> StepReport: ...


@dataclass(frozen=True, slots=True)
class Points:
    """Observers of a step, by the point at which they are called.

    Args:
        batch_read: Called with each batch before the first forward pass. An observer that is done
            removes itself from this list, since the others are called in every step.
        microbatch_done: Called after a backward pass with the update, the step's input, the index
            of the microbatch on this rank, and the loss terms so far.
        gradients_reduced: Called when the gradients are summed over all microbatches and ranks,
            with the update and the loss terms.
        before_update: Called before weights and optimizer state change.
        published: Called when the weights of the step are final.
    """

    batch_read: Sequence[Callable[[Batch], object]] = ()
    microbatch_done: tuple[Callable[[LiveUpdate, StepInput, int, Totals], object], ...] = ()
    gradients_reduced: tuple[Callable[[LiveUpdate, Totals], object], ...] = ()
    before_update: tuple[Callable[[], object], ...] = ()
    published: tuple[Callable[[StepDone], object], ...] = ()


NO_POINTS = Points()


@dataclass(slots=True)
class Observers:
    """Observers that are collected until a step program is made; see `Points`."""

    batch_read: list[Callable[[Batch], object]] = field(default_factory=list)
    microbatch_done: list[Callable[[LiveUpdate, StepInput, int, Totals], object]] = field(
        default_factory=list
    )
    gradients_reduced: list[Callable[[LiveUpdate, Totals], object]] = field(default_factory=list)
    before_update: list[Callable[[], object]] = field(default_factory=list)
    published: list[Callable[[StepDone], object]] = field(default_factory=list)

    def copy(self) -> Observers:
        """Return a copy to which further observers can be added."""
        return Observers(*(list(getattr(self, each.name)) for each in fields(self)))

    def points(self) -> Points:
        """Return the observers as a step program keeps them."""
        _, *others = (tuple(getattr(self, each.name)) for each in fields(self))
        return Points(self.batch_read, *others)


def join_updates(given: StepInput, updates: list[UpdateDone]) -> StepDone:
    """Return a step after its updates: it was applied if all of them were."""
    was_applied: bool | Tensor = True
    overflowed: bool | Tensor = False
    for number, (_, _, applied) in enumerate(updates):
        was_applied = was_applied & applied.was_applied if number else applied.was_applied
        overflowed = overflowed | applied.overflowed
    return StepDone(given, updates, was_applied, overflowed)


def make_report(done: StepDone, num_samples: int, names: Sequence[str]) -> StepReport:
    """Return the report of a step on `num_samples` samples of all ranks.

    `names` are the names of all updates of the task; with several, a loss term is reported as
    `update.term`.
    """
    given, updates = done.given, done.updates
    totals: Totals = {}
    keys: dict[str, tuple[str, ...]] = {}
    rate: float | Tensor | None = 0.0
    for update, gradients, _ in updates:
        mine = gradients.totals
        if len(names) > 1:
            mine = {f"{update.name}.{name}": row for name, row in mine.items()}
        totals.update(mine)
        keys[update.name] = tuple(mine)
        rate = learning_rate_of(update.guarded.optimizers[0].param_groups[0])
    if not given.is_sized:  # the batches do not tell their size
        num_samples = round(float(next((count for _, count, _ in totals.values()), 0)))
    norm = updates[0].applied.norm if len(updates) == 1 else None
    report = StepReport(
        given.number,
        given.epoch,
        num_samples,
        rate,
        totals,
        norm,
        done.was_applied,
        given.waiting_s,
    )
    report.updates = keys
    return report
