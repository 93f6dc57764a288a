"""Number formats of forward and backward passes, the loss scale of fp16, and what a pass really used."""

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
