"""Rows of each tensor that a rank stores.

All ZeRO stages split a tensor along its first dimension, so that a file contains whole rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.contract.state import Owner, Part, master_of
from surefoot.core.errors import SpecError
from surefoot.runtime.comm.group import Group

Named = Sequence[tuple[str, Tensor]]
# as for torch's optimizers
Given = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]

TAKES = (
    "give a module, parameters, pairs of a name and a parameter, or groups: "
    "dicts with an entry 'params'"
)


def cut_rows(tensors: Sequence[tuple[int, int]], num_ranks: int) -> list[list[range]]:
    """Return the rows of each tensor for each rank, so that all ranks store about as many elements.

    `tensors` are pairs: number of rows, size of a row. They are concatenated and cut into
    `num_ranks` parts of equal size; each cut is moved to the nearest row. The result has a range of
    rows for each tensor and rank.

    >>> cut_rows([(2, 3), (1, 3), (5, 1)], 2)
    [[range(0, 2), range(2, 2)], [range(0, 0), range(0, 1)], [range(0, 0), range(0, 5)]]
    """
    total = sum(rows * width for rows, width in tensors)
    begin, found = 0, []
    for rows, width in tensors:
        ends = [
            min(rows, max(0, round((total * rank / num_ranks - begin) / max(1, width))))
            for rank in range(num_ranks)
        ]
        ends = [0, *ends[1:], rows]
        found.append([range(*pair) for pair in pairwise(ends)])
        begin += rows * width
    return found


def serve_part(
    parameter: Tensor, held: Tensor, start: int, owner: Owner, *, on_host: bool = False
) -> Tensor:
    """Make `held` the master of `parameter`, which the optimizer updates, and return the master.

    `held` contains the rows of `parameter` from `start` on. The master uses the same memory, or,
    with `on_host`, is a copy in host memory.
    """
    rows = held.detach().to("cpu", copy=True) if on_host else held.detach()
    master = nn.Parameter(rows, requires_grad=parameter.requires_grad)
    master.part = Part(start, tuple(parameter.shape), owner)  # type: ignore[attr-defined]
    master.served, parameter.master = parameter, master  # type: ignore[attr-defined]
    return master


def check_has_rows(named: Named) -> None:
    """Raise SpecError for a scalar or complex parameter, which cannot be split by rows."""
    for name, parameter in named:
        if parameter.ndim == 0:
            raise SpecError(
                f"layout.shard splits parameters by rows, and {name} has no dimension",
                hint="give it the shape (1,) in the model",
            )
        if parameter.is_complex():
            raise SpecError(
                f"layout.shard takes real parameters, but {name} is complex",
                hint="use layout.replicate alone",
            )


@dataclass(frozen=True)
class ListedGroup:
    """Parameter group as the caller passed it: its settings, and its parameters with their names.

    If `has_names` is false, the names were derived from the index of the parameter.
    """

    settings: Mapping[str, Any]
    named: Named
    has_names: bool

    def with_masters(self) -> dict[str, Any]:
        """Return the group for an optimizer, with the master of each parameter that is trained."""
        pairs = [(name, master_of(each)) for name, each in self.named if each.requires_grad]
        return {
            **self.settings,
            "params": pairs if self.has_names else [master for _, master in pairs],
        }


def read_groups(given: Given) -> list[ListedGroup]:
    """Return the argument of a torch optimizer as a list of groups.

    A module is one group, and so are parameters without groups. A tied parameter appears once in a
    group. Raises SpecError for any other argument, for an empty one, for a parameter in two groups,
    and for a tensor that is not a leaf.
    """
    if isinstance(given, nn.Module):
        return [ListedGroup({}, [*given.named_parameters()], False)]
    if isinstance(given, Tensor) or not isinstance(given, Iterable):
        raise SpecError(
            f"expected parameters to split, but {_kind_of(given)} was given", hint=TAKES
        )
    items: list[Any] = list(given)
    are_groups = [isinstance(each, Mapping) for each in items]
    if not items or len(set(are_groups)) > 1:
        what = "groups and parameters side by side were given" if items else "none were given"
        raise SpecError(f"expected parameters to split, but {what}", hint=TAKES)
    if not are_groups[0]:
        return [_read_group({"params": items}, "parameter ")]
    groups = [_read_group(each, f"parameter {number}.") for number, each in enumerate(items)]
    homes: dict[int, int] = {}
    for number, group in enumerate(groups):
        for name, parameter in group.named:
            if homes.setdefault(id(parameter), number) != number:
                raise SpecError(
                    f"{name} is in group {homes[id(parameter)]}, too",
                    hint="give each parameter in one group",
                )
    return groups


def _read_group(given: Mapping[str, Any], prefix: str) -> ListedGroup:
    settings = dict(given)
    held: Any = settings.pop("params", None)
    if isinstance(held, set | frozenset) or not isinstance(held, Iterable):
        what = (
            "a set, which each rank may read in a different order"
            if isinstance(held, set | frozenset)
            else _kind_of(held)
        )
        raise SpecError(
            f"the 'params' of a group with the entries {sorted(given)} are {what}", hint=TAKES
        )
    items = [held] if isinstance(held, Tensor) else list(held)
    if "param_names" in settings:  # as in the groups of a torch optimizer
        items = [*zip(settings.pop("param_names"), items, strict=True)]
    are_pairs = [isinstance(each, tuple) and len(each) == 2 for each in items]
    if len(set(are_pairs)) > 1:
        raise SpecError(
            "some parameters of a group have a name, and others have none",
            hint="give a name to all, or to none",
        )
    found: dict[int, tuple[str, Tensor]] = {}
    for number, each in enumerate(items):
        name, parameter = each if are_pairs[number] else (f"{prefix}{number}", each)
        if not isinstance(parameter, Tensor):
            raise SpecError(
                f"expected parameters to split, but {_kind_of(parameter)} is among them",
                hint=TAKES,
            )
        if not parameter.is_leaf:
            raise SpecError(
                f"{name} is not a leaf: it was computed, and has no gradient of its own",
                hint="give what it was computed of",
            )
        found.setdefault(id(parameter), (name, parameter))
    return ListedGroup(settings, [*found.values()], any(are_pairs))


def _kind_of(given: Any) -> str:
    return (
        f"a tensor of shape {list(given.shape)}"
        if isinstance(given, Tensor)
        else f"{type(given).__name__} {given!r:.60}"
    )


@torch.no_grad()
def gather_rows(group: Group, held: Tensor, part: Part) -> Tensor:
    """Return a whole tensor on every rank of a group, gathered from the rows of each rank.

    Args:
        group: The ranks, in the order of their rows.
        held: The rows of this rank, (rows, ...); the number of rows may differ between ranks.
        part: The part of the whole tensor that `held` is, as `part_of` returns it.
    """
    counts = group.gather(torch.tensor(len(held), device=group.device)).tolist()
    padded = held.new_zeros((max(counts), *held.shape[1:]))
    padded[: len(held)] = held
    rows = group.gather(padded.contiguous())
    return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)]).reshape(
        part.whole
    )
