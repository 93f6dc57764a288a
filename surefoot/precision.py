"""Number formats of forward and backward passes, fp16 loss scaling, and dtypes really used."""

from __future__ import annotations

from surefoot.components.precision import (
    DtypeRecord,
    LossScaler,
    Watch,
    compute_context,
    count_lost,
    was_clipped_first,
)

__all__ = [
    "DtypeRecord",
    "LossScaler",
    "Watch",
    "compute_context",
    "count_lost",
    "was_clipped_first",
]
