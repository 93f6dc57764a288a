"""Reports on module attributes that change in a step: unsaved ones, and copies on each rank."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.core.units import name_some

UNSAVED = (
    "{names} of the model changes while it trains, but a checkpoint cannot hold it: "
    "a resumed run has the initial value of model()"
)
KEEP_ALL = (
    "keep it in a tensor, or in a list, tuple or dict of tensors; "
    "a random generator: return it from state() of the task"
)
OF_RANKS = (
    "{names} of the model changes while it trains, but each of {size} ranks has a "
    "separate copy: the copy of rank 0 is saved, and all ranks resume with it"
)
KEEP_ONE = (
    "keep only values that are the same on all ranks in it; or change a tensor in "
    "place, and return it from state() of the task, with 'per_rank' in "
    "state_on_ranks: the tensor of each rank is then saved and restored"
)
MAX_NAMED = 8


class AttributeNotes:
    """Reports that name every attribute once."""

    def __init__(self, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self._reported: set[str] = set()

    def take(self, saved: Sequence[str], unsaved: Sequence[str]) -> list[tuple[str, str]]:
        """Return the reports on attributes not reported before, as (finding, action)."""
        notes = []
        if new := self._take_new(unsaved):
            notes.append((UNSAVED.format(names=new), KEEP_ALL))
        if self._num_ranks > 1 and (new := self._take_new(saved)):
            notes.append((OF_RANKS.format(names=new, size=self._num_ranks), KEEP_ONE))
        return notes

    def _take_new(self, names: Sequence[str]) -> str:
        new = [name for name in names if name not in self._reported]
        self._reported.update(new)
        return name_some(new, MAX_NAMED)
