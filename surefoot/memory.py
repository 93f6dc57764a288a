"""Lower memory of a step: activation checkpointing, offloaded activations, chunked loss."""

from __future__ import annotations

from surefoot.components.memory import Offloaded, linear_cross_entropy, recompute

__all__ = ["Offloaded", "linear_cross_entropy", "recompute"]
