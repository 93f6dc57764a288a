"""Number formats of forward and backward passes, fp16 loss scaling, and dtypes really used."""

from __future__ import annotations

from surefoot.components.precision import (
    DtypeRecord,
    LossScaler,
    Watch,
    compute_context,
)

__all__ = [
    "DtypeRecord",
    "LossScaler",
    "Watch",
    "compute_context",
]
