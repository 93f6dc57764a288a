"""What a step does together with the other ranks: gradients, sums, buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from surefoot.components.optim import leaf_of
from surefoot.components.parallel import JoinedBuffers, Replicas, Totals
from surefoot.components.parallel.totals import Row
from surefoot.runtime.comm import Group

if TYPE_CHECKING:
    from surefoot.train.step.stepper import LiveUpdate


class Ranks:
    """The parts of a step that all ranks take part in. Each of them calls the same methods in the same order."""

    def __init__(self, group: Group, model: nn.Module, updates: Sequence[LiveUpdate], *, joins_buffers: bool = True) -> None:
        self.group = group
        self.replicas = [Replicas([leaf_of(each) for each in update.guarded.parameters], group) for update in updates]
        self.totals = Totals(group)
        self.buffers = JoinedBuffers(model, group, joins_norms=joins_buffers)
        self.num_samples = 0  # of the step, on all ranks
        self._mine, self._was_told = 0, False

    def begin(self, num_samples: int) -> None:
        """A step begins, in which this rank reads so many samples."""
        self._mine, self._was_told = num_samples, False
        self.buffers.keep()

    def add(self, update: str, mine: Mapping[str, Row]) -> dict[str, Row]:
        """The loss terms of all ranks; with the first of a step go the samples."""
        found, told = self.totals.add(update, mine, () if self._was_told else (float(self._mine),))
        if told:
            self._was_told, self.num_samples = True, int(told[0])
        return found

    def end(self) -> None:
        """All passes of a step are over."""
        if not self._was_told:
            self.add("", {})
        self.buffers.join()

    @property
    def num_bytes(self) -> int:
        """What this rank gave to the sums of gradients so far."""
        return sum(each.num_bytes for each in self.replicas)

    @property
    def num_collectives(self) -> int:
        """The sums of gradients so far."""
        return sum(each.num_collectives for each in self.replicas)

    def close(self) -> None:
        for each in self.replicas:
            each.close()
