"""Bitwise identical results on 1, 2, 4 ... ranks: gradients are summed in an order that does not
depend on the number of ranks.

A sum of floating-point numbers depends on its order, and the order of an all-reduce depends on the
ranks. With virtual ranks, a step is always split between the same number of virtual ranks, a power
of two: each sums the gradients of its microbatches, the sums of two neighbors are added, then those
of two pairs, and so on. A rank computes several consecutive virtual ranks, a subtree, and gathers
the sums of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from surefoot.components.parallel.wires import Wait
from surefoot.contract.state import master_of
from surefoot.runtime.comm.group import Group

Grads = list[Tensor | None]


class VirtualRanks:
    """The assignment of microbatches to `size` virtual ranks, of which this rank computes `own`
    consecutive ones from `first` on."""

    def __init__(self, size: int, group: Group) -> None:
        self.size, self.own, self.group = size, size // group.size, group
        self.first = group.rank * self.own
        self._ends: list[int] = []

    def begin(self, num_microbatches: int) -> None:
        """Start a step of `num_microbatches` microbatches on all ranks together."""
        every = range(self.first, self.first + self.own)
        self._ends = [-(-num_microbatches * (each + 1) // self.size) for each in every]

    def count_over(self, done: int) -> int:
        """Return how many of this rank's virtual ranks finish with the first `done` microbatches of
        the step, and were not counted before."""
        over = [end for end in self._ends if end <= done]
        self._ends = self._ends[len(over) :]
        return len(over)

    @torch.no_grad()
    def sum_in_rank_order(self, rows: Tensor) -> Tensor:
        """Return the sum of every virtual rank's row, added in their order: (own, n) -> (n),
        float64.

        The all-reduce before it only adds zeros, which changes no bit.
        """
        table = rows.new_zeros((self.size, *rows.shape[1:]))
        table[self.first : self.first + self.own] = rows
        total = torch.zeros_like(table[0])
        for row in self.group.add(table):
            total += row
        return total


class OrderedGradientSum:
    """The gradients of one update, summed in a binary tree over virtual ranks."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._parameters = [master_of(each) for each in leaves if each.requires_grad]
        # sums that wait for their neighbor, each with its level
        self._tree: list[tuple[int, Grads]] = []

    @torch.no_grad()
    def end_one(self) -> None:
        """End a virtual rank: take its summed gradients off the parameters, and add them to the
        tree."""
        node: Grads = [each.grad for each in self._parameters]
        level = 0
        for each in self._parameters:
            each.grad = None
        while self._tree and self._tree[-1][0] == level:
            _, left = self._tree.pop()
            node, level = [_add(*pair) for pair in zip(left, node, strict=True)], level + 1
        self._tree.append((level, node))

    def put_back(self) -> None:
        """Put the sum over all virtual ranks of this rank into the parameters' `.grad`."""
        ((_, node),) = self._tree
        self._tree = []
        for parameter, grad in zip(self._parameters, node, strict=True):
            parameter.grad = grad


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Add two gradients; a missing one counts as zeros, as it does on a rank without it: 0 + -0 is
    0."""
    if left is None:
        return None if right is None else right.add_(0.0)
    return left.add_(0.0) if right is None else left.add_(right)


class InOrder:
    """Bucket reducer with a fixed order: each rank gathers this bucket of all ranks, and adds
    neighbors, then pairs of these sums."""

    def __init__(self, flat: Tensor, group: Group) -> None:
        self._flat, self._group = flat, group

    def begin(self) -> Wait:
        if self._group.memory_of(self._flat) is not None:
            # the reduction through shared memory adds in that order
            return self._group.begin_to_add(self._flat)
        return self._exchange

    @torch.no_grad()
    def _exchange(self) -> None:
        if self._group.is_alone:
            return
        rows: Sequence[Tensor] = self._group.gather(self._flat).unbind()
        while len(rows) > 1:
            rows = [left.add_(right) for left, right in zip(rows[::2], rows[1::2], strict=True)]
        self._flat.copy_(rows[0])
