"""Memory: what a step holds, and what it need not hold."""

from surefoot.components.memory.chunked import linear_cross_entropy
from surefoot.components.memory.recompute import Recomputed, recompute

__all__ = ["Recomputed", "linear_cross_entropy", "recompute"]
