"""Memory: activation checkpointing, offloading, chunked losses, and weights mapped from a file."""

from surefoot.components.memory.blocks import find_blocks
from surefoot.components.memory.chunked import linear_cross_entropy
from surefoot.components.memory.offload import Offloaded
from surefoot.components.memory.recompute import Recomputed, recompute
from surefoot.components.memory.spilled import Spilled

__all__ = ["Offloaded", "Recomputed", "Spilled", "find_blocks", "linear_cross_entropy", "recompute"]
