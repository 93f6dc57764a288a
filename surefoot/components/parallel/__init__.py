"""Training on several ranks, with results that equal those of one process."""

from surefoot.components.parallel.norms import JoinedBuffers
from surefoot.components.parallel.replicate import Replicas
from surefoot.components.parallel.shard import FullySharded, Sharded, ShardedState, gather_rows
from surefoot.components.parallel.sync_norm import SyncNorm, join_batchnorm
from surefoot.components.parallel.totals import Totals
from surefoot.components.parallel.wires import Compression
from surefoot.components.parallel.wrapped import check_unwrapped

__all__ = [
    "Compression",
    "FullySharded",
    "JoinedBuffers",
    "Replicas",
    "Sharded",
    "ShardedState",
    "SyncNorm",
    "Totals",
    "check_unwrapped",
    "gather_rows",
    "join_batchnorm",
]
