"""Dtypes of forward and backward passes, fp16 loss scaling, and a record of the dtypes used."""

from __future__ import annotations

from surefoot.components.precision.instability import Watch, count_lost, was_clipped_first
from surefoot.components.precision.policy import compute_context
from surefoot.components.precision.record import DtypeRecord
from surefoot.components.precision.scaler import LossScaler

__all__ = [
    "DtypeRecord",
    "LossScaler",
    "Watch",
    "compute_context",
    "count_lost",
    "was_clipped_first",
]
