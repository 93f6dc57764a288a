"""Process groups of a rank on the axes `replicate` and `shard` of the layout."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from surefoot.core.ranks.layout import Layout
from surefoot.runtime.comm.group import ALONE, Group, raise_lost_rank


@dataclass(frozen=True)
class Mesh:
    """Groups to which a rank belongs, one on each axis of the layout.

    Ranks with consecutive numbers are neighbors on the `shard` axis. The numbers of neighbors on
    the `replicate` axis differ by the size of the `shard` axis.

    Args:
        whole: Group of all ranks.
        replicate: Group of the ranks that hold the same part of the state.
        shard: Group of the ranks that hold the different parts of one replica.
    """

    whole: Group
    replicate: Group
    shard: Group

    @property
    def is_sharded(self) -> bool:
        return not self.shard.is_alone


SOLO = Mesh(ALONE, ALONE, ALONE)


def lay_out(group: Group, layout: Layout, *, timeout_s: float) -> Mesh:
    """Create the process groups of `layout`; each rank must call this once.

    Args:
        group: Group of all ranks, as `join` returns it.
        layout: The number of ranks on each axis.
        timeout_s: Seconds after which a collective fails.

    Raises:
        LostRank: If another rank fails meanwhile.
    """
    if not layout.is_sharded:
        return Mesh(group, group, ALONE)
    if layout.replicate == 1:
        return Mesh(group, ALONE, _make_subgroup(group, range(group.size), dist.group.WORLD, 2))
    across = [range(first, group.size, layout.shard) for first in range(layout.shard)]
    along = [range(first, first + layout.shard) for first in range(0, group.size, layout.shard)]
    found: list[Group] = []
    for number, axis in enumerate((across, along), start=1):
        for ranks in axis:
            with raise_lost_rank():
                # each rank must create all groups
                channel = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
            if group.rank in ranks:
                found.append(_make_subgroup(group, ranks, channel, number))
    return Mesh(group, *found)


def _make_subgroup(group: Group, ranks: range, channel: Any, axis: int) -> Group:
    memory = None if group.memory is None else group.memory.among(ranks, axis)
    return Group(
        ranks.index(group.rank),
        len(ranks),
        group.device,
        group.flight,
        channel,
        group.roll,
        waiting=group.waiting,
        memory=memory,
    )
