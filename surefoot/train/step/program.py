"""Interfaces of a training step: its input and result, its two parts, and its five points.

A step program takes the batches of a step and returns its report. It calls two parts for each
update: `Accumulate` runs the forward and backward passes, and `Apply` runs the optimizer. A
pipeline, a compiled step or a foreign engine replaces one of them, or the whole program. Observers
are called at five points and change nothing that is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

from torch import Tensor

from surefoot.contract.state import StepReport
from surefoot.contract.task import Batch
from surefoot.train.step.update import LiveUpdate, Totals

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
    """

    totals: Totals
    scale: float | None = None
    applied: Applied | None = None


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
    """One training step."""

    def __call__(self, given: StepInput) -> StepReport: ...


@dataclass(frozen=True, slots=True)
class Points:
    """Observers of a step, by the point at which they are called.

    Args:
        batch_read: Called with each batch before the first forward pass.
        microbatch_done: Called after a backward pass with the update, the step's input, the index
            of the microbatch on this rank, and the loss terms so far.
        gradients_reduced: Called when the gradients are summed over all microbatches and ranks,
            with the update and the loss terms.
        before_update: Called before weights and optimizer state change.
        published: Called when the weights of the step are final.
    """

    batch_read: tuple[Callable[[Batch], object], ...] = ()
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
        """Return the observers as tuples, which a step program keeps."""
        return Points(*(tuple(getattr(self, each.name)) for each in fields(self)))
