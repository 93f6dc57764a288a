"""Ranks that hold a part each: of the optimiser's state, of gradients too, of weights too (stages 1, 2 and 3 of ZeRO).

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020).
"""

from surefoot.components.parallel.shard.fully import FullySharded
from surefoot.components.parallel.shard.parts import cut_rows, gather_rows
from surefoot.components.parallel.shard.state import ShardedState

Sharded = FullySharded | ShardedState

__all__ = ["FullySharded", "Sharded", "ShardedState", "cut_rows", "gather_rows"]
