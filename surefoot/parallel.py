"""Process groups, gradient reduction, and sharding of optimizer state and weights."""

from __future__ import annotations

from surefoot.components.parallel.norms import JoinedBuffers
from surefoot.components.parallel.replicate import Replicas
from surefoot.components.parallel.shard.fully import FullySharded
from surefoot.components.parallel.shard.parts import gather_rows
from surefoot.components.parallel.shard.state import ShardedState
from surefoot.components.parallel.sync_norm import SyncNorm
from surefoot.components.parallel.wires import Compression
from surefoot.contract.state import part_of
from surefoot.core.place import here as this_rank
from surefoot.core.ranks.layout import Layout
from surefoot.runtime.comm.group import ALONE, Group
from surefoot.runtime.comm.join import join
from surefoot.runtime.comm.mesh import Mesh, lay_out

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
