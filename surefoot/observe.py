"""Throughput and logging of a training loop."""

from __future__ import annotations

from surefoot.components.observe.console import Console
from surefoot.components.observe.meter import Meter
from surefoot.components.observe.tensorboard import TensorBoard

__all__ = ["Console", "Meter", "TensorBoard"]
