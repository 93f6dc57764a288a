"""An update of a step: its loss and its optimizers, its loss terms, and its backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.components.optim.backward import backward
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.task import Batch, Loss, Term
from surefoot.core.errors import TaskError
from surefoot.train.step.counts import Count

if TYPE_CHECKING:
    from surefoot.components.optim.in_backward import UpdateInBackward

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
) -> None:
    """Run the backward pass of all terms, except constant totals without items.

    With `is_even`, all ranks need equal numbers of backward passes. A TaskError is raised if no
    term is left for this one.
    """
    pairs = zip(terms, factors, strict=True)
    kept = [
        (term.total, factor)
        for term, factor in pairs
        if term.total.requires_grad or float(term.count)
    ]
    if is_even and not kept:
        raise TaskError(
            "the loss of a batch without items is a constant, and stages 2 and 3 gather weights "
            "in the backward pass of every rank",
            hint="return a total that depends on the model for such a batch too: 0.0 * "
            "output.sum()",
        )
    if kept:
        backward([total for total, _ in kept], [factor for _, factor in kept], inputs)


def add_terms(into: Totals, terms: tuple[Term, ...]) -> None:
    """Add the terms of a microbatch to the totals, counts and weights of `into`."""
    for term in terms:
        total = term.total.detach()
        count: Count = term.count
        if term.name in into:
            total, count = into[term.name][0] + total, into[term.name][1] + count
        into[term.name] = (total, count, term.weight)
