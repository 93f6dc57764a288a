"""Reduction of the memory of a step: activation checkpointing and offloading, chunked loss."""

from __future__ import annotations

from surefoot.components.memory.chunked import linear_cross_entropy
from surefoot.components.memory.offload import Offloaded
from surefoot.components.memory.recompute import recompute

__all__ = ["Offloaded", "linear_cross_entropy", "recompute"]
