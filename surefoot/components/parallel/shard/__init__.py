"""Sharding (ZeRO): ranks that each hold a part of the optimizer's state (stage 1), also of
gradients (2), also of weights (3).

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020).
"""

from surefoot.components.parallel.shard.fully import FullySharded
from surefoot.components.parallel.shard.parts import cut_rows, gather_rows
from surefoot.components.parallel.shard.state import ShardedState

Sharded = FullySharded | ShardedState

__all__ = ["FullySharded", "Sharded", "ShardedState", "cut_rows", "gather_rows"]
