"""Check that all replicas hold bitwise identical tensors: a sum over the bits of each tensor,
compared between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.runtime.comm.group import Group

# integer dtype by element size
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Apart(NamedTuple):
    """A rank whose tensor `name` differs from that of the other ranks.

    If `is_certain` is true, more than half of the ranks agree, and this rank differs from them;
    otherwise this rank differs from rank 0.
    """

    rank: int
    name: str
    is_certain: bool


@torch.no_grad()
def bit_sum(tensor: Tensor) -> Tensor:
    """Return the bits of `tensor` as integers, summed in 64 bits (shape ()); flipping any one bit
    changes the sum."""
    held = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return held.contiguous().view(WHOLE[held.element_size()]).sum(dtype=torch.int64)


def find_apart(group: Group, tensors: Mapping[str, Tensor]) -> list[Apart]:
    """Return the ranks whose tensors differ from those of the majority, each with its first
    differing tensor.

    Without a majority the ranks are compared with rank 0. All ranks of `group` must call it.
    """
    if group.is_alone or not tensors:
        return []
    rows = group.gather(
        torch.stack([bit_sum(each).to(group.device) for each in tensors.values()])
    ).tolist()
    found: dict[int, Apart] = {}
    for place, name in enumerate(tensors):
        held = [row[place] for row in rows]
        (most, count), *_ = Counter(held).most_common()
        is_certain = 2 * count > group.size
        expected = most if is_certain else held[0]
        for rank, value in enumerate(held):
            if value != expected:
                found.setdefault(rank, Apart(rank, name, is_certain))
    return [found[rank] for rank in sorted(found)]
