"""The same bits on 1, 2, 4 ... ranks: sums in an order that does not depend on who computes what.

A sum of floating-point numbers depends on its order, and the order of an all-reduce on the ranks. Here a step is always shared by the same
number of virtual ranks, a power of two: each adds up the microbatches that are its own, and the sums of two neighbours are added, then
those of two pairs, and so on. A rank computes for several virtual ranks in a row, which are a subtree, and gathers the others'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from surefoot.components.parallel.wires import Wait
from surefoot.contract.state import master_of
from surefoot.runtime.comm import Group

Grads = list[Tensor | None]


class VirtualRanks:
    """Which microbatches are whose: `size` virtual ranks, of which this rank computes for `own` in a row."""

    def __init__(self, size: int, group: Group) -> None:
        self.size, self.own, self.group = size, size // group.size, group
        self.first = group.rank * self.own
        self._ends: list[int] = []

    def begin(self, num_microbatches: int) -> None:
        """A step of so many microbatches on all ranks."""
        every = range(self.first, self.first + self.own)
        self._ends = [-(-num_microbatches * (each + 1) // self.size) for each in every]

    def count_over(self, done: int) -> int:
        """How many virtual ranks are over now that the first `done` microbatches of the step are, or another rank's."""
        over = [end for end in self._ends if end <= done]
        self._ends = self._ends[len(over) :]
        return len(over)

    @torch.no_grad()
    def in_order(self, rows: Tensor) -> Tensor:
        """The sum of every virtual rank's row, in their order: (own, n) into (n), float64. Adding to zeros changes no bit."""
        table = rows.new_zeros((self.size, *rows.shape[1:]))
        table[self.first : self.first + self.own] = rows
        total = torch.zeros_like(table[0])
        for row in self.group.add(table):
            total += row
        return total


class Ordered:
    """The gradients of one update, added up virtual rank by virtual rank as they are over."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._parameters = [master_of(each) for each in leaves if each.requires_grad]
        self._tree: list[tuple[int, Grads]] = []  # what waits for its neighbour, and of how many levels it is a sum

    @torch.no_grad()
    def end_one(self) -> None:
        """A virtual rank is over: what its microbatches left as gradients is its sum."""
        node: Grads = [each.grad for each in self._parameters]
        level = 0
        for each in self._parameters:
            each.grad = None
        while self._tree and self._tree[-1][0] == level:
            _, left = self._tree.pop()
            node, level = [_add(*pair) for pair in zip(left, node, strict=True)], level + 1
        self._tree.append((level, node))

    def put_back(self) -> None:
        """All virtual ranks of this rank are over: their sum stands where gradients stand."""
        ((_, node),) = self._tree
        self._tree = []
        for parameter, grad in zip(self._parameters, node, strict=True):
            parameter.grad = grad


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """A gradient that is not there counts as zeros, as it does on a rank of its own: 0 + -0 is 0."""
    if left is None:
        return None if right is None else right.add_(0.0)
    return left.add_(0.0) if right is None else left.add_(right)


class InOrder:
    """A bucket's way to the other ranks: each has all of them, and adds neighbours, then pairs of them."""

    def __init__(self, flat: Tensor, group: Group) -> None:
        self._flat, self._group = flat, group

    def begin(self) -> Wait:
        if self._group.memory_of(self._flat) is not None:
            return self._group.begin_to_add(self._flat)  # which adds in that order
        return self._exchange

    @torch.no_grad()
    def _exchange(self) -> None:
        if self._group.is_alone:
            return
        rows: Sequence[Tensor] = self._group.gather(self._flat).unbind()
        while len(rows) > 1:
            rows = [left.add_(right) for left, right in zip(rows[::2], rows[1::2], strict=True)]
        self._flat.copy_(rows[0])
