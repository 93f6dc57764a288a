"""Which rows of which tensors a rank holds. All stages split a tensor along its first dimension, so that a file holds rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from surefoot.contract.state import Owner, Part
from surefoot.core.errors import SpecError
from surefoot.runtime.comm import Group


def cut_rows(tensors: Sequence[tuple[int, int]], num_ranks: int) -> list[list[range]]:
    """The rows of each tensor that each rank holds, so that all hold about as much, to half a row at either end.

    `tensors` are (rows, size of a row), laid one behind the other and cut into `num_ranks` parts of one size.

    >>> cut_rows([(2, 3), (1, 3), (5, 1)], 2)
    [[range(0, 2), range(2, 2)], [range(0, 0), range(0, 1)], [range(0, 0), range(0, 5)]]
    """
    total = sum(rows * width for rows, width in tensors)
    begin, found = 0, []
    for rows, width in tensors:
        ends = [min(rows, max(0, round((total * rank / num_ranks - begin) / max(1, width)))) for rank in range(num_ranks)]
        ends = [0, *ends[1:], rows]
        found.append([range(*pair) for pair in pairwise(ends)])
        begin += rows * width
    return found


def serve_part(parameter: Tensor, held: Tensor, start: int, owner: Owner, *, on_host: bool = False) -> Tensor:
    """Let the optimiser move `held`, the rows of `parameter` from `start` on: in their place, or a copy in host memory."""
    rows = held.detach().to("cpu", copy=True) if on_host else held.detach()
    master = nn.Parameter(rows, requires_grad=parameter.requires_grad)
    master.part = Part(start, tuple(parameter.shape), owner)  # type: ignore[attr-defined]
    master.served, parameter.master = parameter, master  # type: ignore[attr-defined]
    return master


def check_has_rows(model: nn.Module) -> None:
    """Raise SpecError for a parameter that cannot be split by rows."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise SpecError(
                f"layout.shard splits parameters by rows, and {name} has no dimension", hint="give it the shape (1,) in the model"
            )
        if parameter.is_complex():
            raise SpecError(f"layout.shard takes real parameters, and {name} is complex", hint="use layout.replicate alone")


@torch.no_grad()
def gather_rows(group: Group, held: Tensor, part: Part) -> Tensor:
    """The whole that `held` is a part of, on every rank of `group`, in the order of its rows."""
    counts = group.gather(torch.tensor(len(held), device=group.device)).tolist()
    padded = held.new_zeros((max(counts), *held.shape[1:]))
    padded[: len(held)] = held
    rows = group.gather(padded.contiguous())
    return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)]).reshape(part.whole)
