"""Do all replicas still hold the same bits? A sum over their bits, tensor by tensor, held side by side: a flipped one moves it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.runtime.comm import Group

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


class Apart(NamedTuple):
    """A rank that holds other bits than the others in the tensor `name`; `is_certain` where more than half of the ranks agree."""

    rank: int
    name: str
    is_certain: bool


@torch.no_grad()
def bit_sum(tensor: Tensor) -> Tensor:
    """The bits of `tensor` as whole numbers, summed in 64 bits: whatever one bit is flipped, the sum is another. ()"""
    held = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return held.contiguous().view(WHOLE[held.element_size()]).sum(dtype=torch.int64)


def find_apart(group: Group, tensors: Mapping[str, Tensor]) -> list[Apart]:
    """The ranks whose tensors differ from those of most, each with the first tensor; without a majority from rank 0's."""
    if group.is_alone or not tensors:
        return []
    rows = group.gather(torch.stack([bit_sum(each).to(group.device) for each in tensors.values()])).tolist()
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
