"""Check that all replicas have bitwise identical tensors.

The bits of each tensor are summed as integers, and the sums are compared between ranks.
"""

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
    """Rank whose tensor `name` differs from the same tensor on other ranks.

    If `is_certain` is true, more than half of the ranks agree with each other, and this rank
    differs from them. Otherwise there is no such majority, and this rank differs from rank 0.
    """

    rank: int
    name: str
    is_certain: bool


@torch.no_grad()
def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of all elements of `tensor`, with their bits read as integers.

    The sum is a 64-bit integer of shape (). If any single bit of the tensor is flipped, the sum
    changes.
    """
    held = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return held.contiguous().view(WHOLE[held.element_size()]).sum(dtype=torch.int64)


def find_apart(group: Group, tensors: Mapping[str, Tensor]) -> list[Apart]:
    """Return the ranks whose tensors differ from those of the majority of ranks.

    Each rank is returned with the name of the first tensor that differs. A tensor on which no
    majority of the ranks agrees is compared with that of rank 0. All ranks of `group` must call
    this function.
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
