"""Parameters that a forward pass writes on several ranks, such as embeddings with `max_norm`.

A lookup renormalizes the rows of the weight that it reads, in place, and each rank looks up only
the rows for its samples. Other models normalize or clamp a weight in `forward`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot.core.errors import TaskError
from surefoot.runtime.attributes.rewritten import find_renormed, find_rewritten
from surefoot.runtime.comm.group import Group


class JoinedRenorms:
    """Synchronization of weights that forward passes write, so that the replicas stay identical.

    Each rank renormalizes the rows of an embedding with `max_norm` that any rank has looked up. Of
    other weights, each element that any rank has written gets the value of the lowest of these
    ranks.
    """

    def __init__(self, model: nn.Module, group: Group, *, is_exact: bool = False) -> None:
        self._model, self._group, self._is_exact = model, group, is_exact
        self._tables = list(find_renormed(model).values())
        self._others: list[nn.Parameter] | None = None
        self._before: list[tuple[Tensor, Tensor]] = []  # the memory of each, and its values

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the weights that forward passes write, before those of an update.

        All ranks must call this method. Raises TaskError if there are such weights and sums are
        computed in the fixed order of `layout.virtual_ranks`.
        """
        if self._others is None:  # the checks before the first step have found them
            self._others = self._find_others()
            if self._others and self._is_exact:
                raise TaskError(
                    f"a forward pass changes a weight of shape {list(self._others[0].shape)}, and "
                    "layout.virtual_ranks joins only embeddings with max_norm",
                    hint="leave layout.virtual_ranks out: each element then gets the value of the "
                    "lowest rank that changed it",
                )
        self._before = [(each.data, each.detach().clone()) for each in self._others]

    def _find_others(self) -> list[nn.Parameter]:
        """Return the written weights, except those of embeddings with `max_norm`.

        A weight counts if any rank has found it.
        """
        tables = {id(each.weight) for each in self._tables}
        mine = {id(each) for each in find_rewritten(self._model).values()}
        parameters = list(self._model.parameters())
        found = self._group.most([float(id(each) in mine) for each in parameters])
        return [
            each
            for each, is_written in zip(parameters, found, strict=True)
            if is_written and id(each) not in tables
        ]

    @torch.no_grad()
    def join(self) -> None:
        """Give all ranks the same written weights.

        All ranks must call this method after the backward passes and before the optimizer step.
        """
        for table in self._tables:
            assert table.max_norm is not None
            norms = torch.linalg.vector_norm(table.weight, table.norm_type, dim=1)
            rows = (norms > self._group.gather(norms).amin(0)).nonzero().flatten()
            if len(rows):  # the operator of the lookup itself: bitwise identical
                torch.embedding_renorm_(table.weight, rows, table.max_norm, table.norm_type)
        for weight, (memory, before) in zip(self._others or (), self._before, strict=True):
            if weight.data_ptr() != memory.data_ptr():  # `weight.data = ...`
                weight.data = memory.copy_(weight)  # which a flat optimizer updates
            self._join_written(weight, before)

    def _join_written(self, weight: nn.Parameter, before: Tensor) -> None:
        # the lowest rank that has written an element has the largest number
        mine = torch.where(weight != before, self._group.size - self._group.rank, 0).float()
        first = mine.clone()
        self._group.begin_to_take_largest(first)()
        values = torch.where((mine == first) & (mine > 0), weight, torch.zeros_like(weight))
        weight.copy_(torch.where(first > 0, self._group.add(values), before))
