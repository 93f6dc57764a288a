"""Share of the training state that one rank of a layout holds, for a trace in one process.

Without sharding, and in stage 1, every gradient is moved into a bucket of its size, which persists
between steps. In stages 2 and 3 a rank keeps rows of the gradient. The state that
`layout.zero_stage` shards is divided by the number of shard ranks. Stage 2 gathers all weights
during a step. Stage 3 gathers the weights outside of blocks, and those of one block at a time.
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
from surefoot.train.assemble.sharding import find_units

GATHERED = "gathered weights"
# blocks whose weights are gathered at the peak of a step, the end of its backward pass
NUM_GATHERED = 1

# gradient buffers that exist at a time: the buffer of one block is freed when that of the next
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
    """Share of the traced model that one rank of `layout` holds.

    In stage 3, a rank gathers the weights of one of `blocks` at a time.
    """

    layout: Layout
    blocks: Mapping[str, nn.Module]

    @property
    def is_split(self) -> bool:
        """True if gradients are reduced to rows in the backward pass (stages 2 and 3)."""
        return self.layout.is_sharded and self.layout.stage > 1

    def of(self, kind: str) -> float:
        """Return the fraction (0 to 1) of the bytes of `kind`, such as "optimizer", on one rank."""
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
    """Simulation of one rank's gradient buffers in a traced backward pass.

    Create the object before the traced step, while allocations are not recorded.
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
        """Prepare for a backward pass; `is_last` is true for the last microbatch of the step."""
        self._is_last = is_last
        self._left = Counter(self._sizes)

    def take(self, parameter: Tensor) -> None:
        """Move the gradient that the backward pass has just computed for `parameter`."""
        if not self._share.is_split:
            if self._is_last:
                master_of(parameter).grad = self._kept[id(parameter)]
            return
        unit = self._unit_of[id(parameter)]
        self._left[unit] -= 1
        if not self._left[unit]:
            members = [each for each in self._trained if self._unit_of[id(each)] == unit]
            size = NUM_SENT * sum(map(_num_bytes, members))
            self._watched.pass_through(size, GRADIENTS)  # buffers for the reduce-scatter
            for each in members:
                master_of(each).grad = None

    def end_passes(self) -> None:
        """Set every `grad` for the optimizer, after all backward passes of an update."""
        for each in self._trained:
            master_of(each).grad = self._kept[id(each)]


def _num_bytes(parameter: Tensor) -> int:
    return sum(each.numel() * each.element_size() for each in find_tensors(parameter))
