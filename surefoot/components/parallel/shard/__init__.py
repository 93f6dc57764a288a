"""Sharding (ZeRO): each rank stores only a part of the training state.

In stage 1 that is a part of the optimizer state, in stage 2 also of the gradients, and in stage 3
also of the weights.

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from surefoot.components.parallel.shard.fully import FullySharded
    from surefoot.components.parallel.shard.state import ShardedState

Sharded: TypeAlias = "FullySharded | ShardedState"
