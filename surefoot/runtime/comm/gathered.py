"""Differentiable all_gather inside a loss, for losses that compare samples with each other."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from surefoot.runtime.comm.group import ALONE, Group


class Gathering:
    """Context in which `all_gather` communicates over `group`, in forward and backward passes."""

    def __init__(self, group: Group = ALONE) -> None:
        self.group, self.was_used = group, False

    def __enter__(self) -> Self:
        _current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.remove(self)


# the innermost is last; not a ContextVar, since a backward pass may run in a different thread
_current: list[Gathering] = []


def all_gather(tensor: Tensor) -> Tensor:
    """Return the rows of all ranks, concatenated in rank order: (sum of all B, ...).

    It gathers only in a training step on several ranks. In one process, in evaluation and in
    prediction it returns `tensor` itself.

    Gradients flow back to every rank: the gradient of a row is the sum of its gradients from the
    losses of all ranks. Return a loss over the gathered rows with `additive=False`. It then equals
    the loss of one process, whether each rank sums it over the rows of all ranks or over its own
    rows only.

    Args:
        tensor: The rows of this rank, (B, ...); B may differ from rank to rank.
    """
    if not _current:
        return tensor
    _current[-1].was_used = True
    group = _current[-1].group
    apply: Any = _AllGather.apply
    return tensor if group.is_alone else apply(tensor, group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        counts = group.gather(torch.tensor([len(tensor)], device=group.device)).flatten().tolist()
        mine = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        mine[: len(tensor)] = tensor
        rows = group.gather(mine.to(group.device)).to(tensor.device)
        ctx.group, ctx.start, ctx.count = group, sum(counts[: group.rank]), len(tensor)
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = ctx.group.add(
            grad.clone(memory_format=torch.contiguous_format).to(ctx.group.device)
        ).to(grad.device)
        return total[ctx.start : ctx.start + ctx.count], None
