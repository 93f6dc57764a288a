"""Embeddings with `max_norm` on several ranks.

A lookup renormalizes the rows of the weight that it reads, in place, and each rank looks up only
the rows for its samples.
"""

from __future__ import annotations

import torch
from torch import nn

from surefoot.runtime.comm.group import Group


def find_renormed(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings with `max_norm`, by name.

    Their forward pass renormalizes the rows that it looks up.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    }


class JoinedRenorms:
    """Synchronization of embeddings with `max_norm`, so that the replicas stay identical.

    Each rank renormalizes the rows that any rank has looked up.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._tables, self._group = list(find_renormed(model).values()), group

    @torch.no_grad()
    def join(self) -> None:
        """Renormalize the rows that any rank has looked up in this step.

        All ranks must call this method after the backward passes and before the optimizer step.
        """
        for table in self._tables:
            assert table.max_norm is not None
            norms = torch.linalg.vector_norm(table.weight, table.norm_type, dim=1)
            rows = (norms > self._group.gather(norms).amin(0)).nonzero().flatten()
            if len(rows):  # the operator of the lookup itself: bitwise identical
                torch.embedding_renorm_(table.weight, rows, table.max_norm, table.norm_type)
