"""Embeddings with `max_norm` on several ranks: a lookup shortens rows in place, and each rank looks up those of its own samples."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.runtime.comm import Group


def find_renormed(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The embeddings, by name, whose forward pass changes their weights: `max_norm` shortens the rows that are looked up."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    }


class JoinedRenorms:
    """Shortens on every rank the rows that any of them looked up, so that ranks with the same weights hold the same again."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._tables, self._group = list(find_renormed(model).values()), group

    @torch.no_grad()
    def join(self) -> None:
        """Between the passes and the update of a step; all ranks call it."""
        for table in self._tables:
            assert table.max_norm is not None
            norms = torch.linalg.vector_norm(table.weight, table.norm_type, dim=1)
            rows = (norms > self._group.gather(norms).amin(0)).nonzero().flatten()
            if len(rows):  # by the operation that the lookup itself uses: the same bits
                torch.embedding_renorm_(table.weight, rows, table.max_norm, table.norm_type)
