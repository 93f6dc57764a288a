"""An update of a step: its loss and its optimizers, its loss terms, and its backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.components.optim.backward import backward
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.task import Batch, Loss, Term
from surefoot.core.errors import TaskError
from surefoot.train.step.counts import Count, check_count

if TYPE_CHECKING:
    from surefoot.components.optim.in_backward import UpdateInBackward
    from surefoot.components.stability.noise import GradientNoise

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


def add_noise(
    noise: GradientNoise,
    first: tuple[float | Tensor, Count],
    whole: tuple[float | Tensor, Count],
    factor: float | Tensor,
    sizes: Sequence[int],
) -> None:
    """Add the gradient norms of the `first` microbatch and of the `whole` batch to `noise`.

    Each comes with its number of items. `factor` turns the norm of the first microbatch, which is
    that of a sum, into the norm of the mean of the batch. `sizes` has the samples of each
    microbatch.
    """
    (first_norm, first_count), (norm, count) = first, whole
    # a microbatch in which no item counts has no mean
    if isinstance(first_count, Tensor) or first_count:
        share = first_count / count
        noise.add((first_norm * factor / share) ** 2, norm**2, sizes[0], sum(sizes))


def add_terms(into: Totals, terms: tuple[Term, ...]) -> None:
    """Add the terms of a microbatch to the totals, counts and weights of `into`."""
    for term in terms:
        total = term.total.detach()
        count: Count = term.count
        if term.name in into:
            total, count = into[term.name][0] + total, into[term.name][1] + count
        into[term.name] = (total, count, term.weight)
