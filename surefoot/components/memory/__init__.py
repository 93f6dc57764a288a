"""Memory: activation checkpointing, offloading, chunked losses, and weights mapped from a file."""

from surefoot.components.memory.blocks import find_blocks
from surefoot.components.memory.chunked import linear_cross_entropy
from surefoot.components.memory.offload import Offloaded
from surefoot.components.memory.recompute import RecomputeHandle, recompute
from surefoot.components.memory.spilled import FileBackedParameters

__all__ = [
    "Offloaded",
    "RecomputeHandle",
    "FileBackedParameters",
    "find_blocks",
    "linear_cross_entropy",
    "recompute",
]
