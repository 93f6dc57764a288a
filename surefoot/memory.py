"""Less memory for a step: recomputation, activations in host memory, a loss without its logits."""

from __future__ import annotations

from surefoot.components.memory import (
    Offloaded,
    linear_cross_entropy,
    recompute,
)

__all__ = [
    "Offloaded",
    "linear_cross_entropy",
    "recompute",
]
