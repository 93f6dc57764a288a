"""Summation of gradients in an order that does not depend on the number of ranks.

It makes results bitwise identical on 1, 2, 4, ... ranks. A sum of floating-point numbers depends on
the order of the additions, and the order in an all-reduce depends on the number of ranks.
Therefore, each step is split between a fixed number of virtual ranks, which is a power of two. Each
virtual rank sums the gradients of its microbatches. Then the sums of two neighbors are added, then
those of two neighboring pairs, and so on, as in a binary tree. A rank computes several consecutive
virtual ranks, which form a subtree, and gathers the sums of the other ranks.
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
    """Assignment of the microbatches of a step to `size` virtual ranks.

    This rank computes `own` consecutive virtual ranks, from number `first` on.
    """

    def __init__(self, size: int, group: Group) -> None:
        self.size, self.own, self.group = size, size // group.size, group
        self.first = group.rank * self.own
        self._ends: list[int] = []

    def begin(self, num_microbatches: int) -> None:
        """Start a step that has `num_microbatches` microbatches on all ranks together."""
        every = range(self.first, self.first + self.own)
        self._ends = [-(-num_microbatches * (each + 1) // self.size) for each in every]

    def count_over(self, done: int) -> int:
        """Return how many virtual ranks of this rank have finished since the last call.

        This rank has completed its microbatches up to number `done`, which is counted over the
        microbatches of all ranks in the step.
        """
        over = [end for end in self._ends if end <= done]
        self._ends = self._ends[len(over) :]
        return len(over)

    @torch.no_grad()
    def sum_in_rank_order(self, rows: Tensor) -> Tensor:
        """Return the sum of the rows of all virtual ranks, added in the order of the virtual ranks.

        `rows` (own, n), in float64, are those of this rank; the sum is (n). The rows are exchanged
        by an all-reduce. It only adds zeros to them, which does not change a bit.
        """
        table = rows.new_zeros((self.size, *rows.shape[1:]))
        table[self.first : self.first + self.own] = rows
        total = torch.zeros_like(table[0])
        for row in self.group.add(table):
            total += row
        return total


class OrderedGradientSum:
    """Sum of the gradients of the parameters `leaves`, in a binary tree over virtual ranks."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._parameters = [master_of(each) for each in leaves if each.requires_grad]
        # sums that wait for their neighbor, each with its level
        self._tree: list[tuple[int, Grads]] = []

    @torch.no_grad()
    def end_one(self) -> None:
        """End a virtual rank: move its gradients from the parameters into the tree.

        The `.grad` of each parameter is None afterward.
        """
        node: Grads = [each.grad for each in self._parameters]
        level = 0
        for each in self._parameters:
            each.grad = None
        while self._tree and self._tree[-1][0] == level:
            _, left = self._tree.pop()
            node, level = [_add(*pair) for pair in zip(left, node, strict=True)], level + 1
        self._tree.append((level, node))

    def put_back(self) -> None:
        """Set the `.grad` of each parameter to the sum over all virtual ranks of this rank."""
        ((_, node),) = self._tree
        self._tree = []
        for parameter, grad in zip(self._parameters, node, strict=True):
            parameter.grad = grad


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Add two gradients in place and return the sum; None stands for a gradient of zeros.

    Zeros are really added, although they only turn -0 into 0: the result is then the same as on a
    rank that lacks the gradient and sends zeros. It is None if both gradients are None.
    """
    if left is None:
        return None if right is None else right.add_(0.0)
    return left.add_(0.0) if right is None else left.add_(right)


class InOrder:
    """Bucket reducer that adds in a fixed order.

    Each rank gathers the bucket of every rank. It adds the buckets of neighbors, then the sums of
    neighboring pairs, and so on.
    """

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
