"""Ranks: how they meet, gradients summed over them, optimizer state and weights split over them."""

from __future__ import annotations

from surefoot.components.parallel import (
    Compression,
    FullySharded,
    JoinedBuffers,
    Replicas,
    ShardedState,
    SyncNorm,
)
from surefoot.runtime.comm import (
    ALONE,
    Group,
    Mesh,
    join,
    lay_out,
)

__all__ = [
    "ALONE",
    "Compression",
    "FullySharded",
    "Group",
    "JoinedBuffers",
    "Mesh",
    "Replicas",
    "ShardedState",
    "SyncNorm",
    "join",
    "lay_out",
]
