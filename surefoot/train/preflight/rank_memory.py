"""Share of the training state that one rank of a layout holds, for a trace on one process.

Without sharding, and in stage 1, every gradient is moved into a bucket of its size, which persists
between steps; in stages 2 and 3 a rank keeps rows of the gradient. The state that
`layout.zero_stage` shards is divided by the number of shard ranks. Stage 2 gathers all weights
during a step; stage 3 gathers those outside of blocks, and the weights of one block at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surefoot.components.memory.trace import GRADIENTS, Allocations
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import master_of
from surefoot.core.ranks.layout import Layout, fit
from surefoot.runtime.nested_tensors import find_tensors
from surefoot.train.step.sharding import find_units

GATHERED = "gathered weights"
# blocks whose weights are there at a time where a step holds most: at the end of its backward pass
NUM_GATHERED = 1

# buffers of gradients that are there at a time: that of the block before is freed when the next one
# is sent
NUM_SENT = 2


def find_layout(spec: RunSpec, num_ranks: int | None = None) -> Layout:
    """Return the layout of a spec on `num_ranks` ranks (default: the number that the spec names).

    Raises SpecError if the layout does not fit the ranks.
    """
    table = spec.layout
    world_size = (table.replicate or 1) * table.shard if num_ranks is None else num_ranks
    return fit(world_size, table.replicate, table.shard, table.zero_stage)


@dataclass(frozen=True)
class RankShare:
    """Share of the traced model on one rank of `layout`; gathers one of `blocks` at a time."""

    layout: Layout
    blocks: Mapping[str, nn.Module]

    @property
    def is_split(self) -> bool:
        """True if gradients are reduced to rows in the backward pass (stages 2 and 3)."""
        return self.layout.is_sharded and self.layout.stage > 1

    def of(self, kind: str) -> float:
        """Return the share (0 to 1) of a kind of state (`held`) that one rank holds, in bytes."""
        split = {"optimizer", "averages"} | ({GRADIENTS, "parameters"} if self.is_split else set())
        return 1 / self.layout.shard if self.layout.is_sharded and kind in split else 1.0

    def gathered_bytes(self, model: nn.Module) -> int:
        """Return the peak bytes of the weights that are gathered during a step."""
        if not self.is_split:
            return 0
        whole = sum(map(_num_bytes, model.parameters()))
        if self.layout.stage == 2:
            return whole
        sizes = sorted(
            (sum(map(_num_bytes, each.parameters())) for each in self.blocks.values()), reverse=True
        )
        return whole - sum(sizes) + sum(sizes[:NUM_GATHERED])


def find_share(layout: Layout, model: nn.Module, blocks: Sequence[str | nn.Module]) -> RankShare:
    """Return the share of one rank. Raises SpecError if stage 3 finds no blocks to gather."""
    if not layout.is_sharded or layout.stage == 1:
        return RankShare(layout, {})
    return RankShare(layout, find_units(layout.stage, model, blocks))


class RankGradients:
    """Moves each gradient of a traced backward pass to the buffer where a rank keeps it.

    The object must be made before the traced step, while allocations are not recorded.
    """

    def __init__(self, share: RankShare, model: nn.Module, watched: Allocations) -> None:
        self._share, self._watched = share, watched
        self._trained = [each for each in model.parameters() if each.requires_grad]
        self._kept = {id(each): torch.zeros_like(master_of(each)) for each in self._trained}
        unit_of = {
            id(each): name for name, block in share.blocks.items() for each in block.parameters()
        }
        self._unit_of = {id(each): unit_of.get(id(each), "") for each in self._trained}
        self._sizes = Counter(self._unit_of.values())
        self._left = Counter[str]()
        for each in self._kept.values():
            watched.hold(each, GRADIENTS, share.of(GRADIENTS))

    def begin_pass(self, *, is_last: bool) -> None:
        """Prepare for a backward pass."""
        self._is_last = is_last
        self._left = Counter(self._sizes)

    def take(self, parameter: Tensor) -> None:
        """Move the gradient of `parameter`, which the backward pass has just computed."""
        if not self._share.is_split:
            if self._is_last:
                master_of(parameter).grad = self._kept[id(parameter)]
            return
        unit = self._unit_of[id(parameter)]
        self._left[unit] -= 1
        if not self._left[unit]:
            members = [each for each in self._trained if self._unit_of[id(each)] == unit]
            size = NUM_SENT * sum(map(_num_bytes, members))
            self._watched.pass_through(size, GRADIENTS)  # buffers, of which each rank gets rows
            for each in members:
                master_of(each).grad = None

    def end_passes(self) -> None:
        """Restore every gradient for the optimizer after all backward passes of an update."""
        for each in self._trained:
            master_of(each).grad = self._kept[id(each)]


def _num_bytes(parameter: Tensor) -> int:
    return sum(each.numel() * each.element_size() for each in find_tensors(parameter))
