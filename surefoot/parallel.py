"""Process groups, gradient reduction, and sharding of optimizer state and weights."""

from __future__ import annotations

from surefoot.components.parallel import (
    Compression,
    FullySharded,
    JoinedBuffers,
    Replicas,
    ShardedState,
    SyncNorm,
    gather_rows,
)
from surefoot.contract.state import part_of
from surefoot.core.place import here as this_rank
from surefoot.core.ranks.layout import Layout
from surefoot.runtime.comm import ALONE, Group, Mesh, join, lay_out

__all__ = [
    "ALONE",
    "Compression",
    "FullySharded",
    "Group",
    "JoinedBuffers",
    "Layout",
    "Mesh",
    "Replicas",
    "ShardedState",
    "SyncNorm",
    "gather_rows",
    "join",
    "lay_out",
    "part_of",
    "this_rank",
]
