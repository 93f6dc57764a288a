"""Throughput and logging of a training loop."""

from __future__ import annotations

from surefoot.components.observe import Console, Meter, TensorBoard

__all__ = ["Console", "Meter", "TensorBoard"]
