"""Sharding (ZeRO): ranks that each hold a part of the optimizer's state (stage 1), also of
gradients (2), also of weights (3).

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from surefoot.components.parallel.shard.fully import FullySharded
    from surefoot.components.parallel.shard.state import ShardedState

Sharded: TypeAlias = "FullySharded | ShardedState"
