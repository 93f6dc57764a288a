"""Precision: which dtype computes what, and the loss scale that fp16 needs."""

from surefoot.components.precision.policy import (
    HALVES,
    PLAIN,
    Compute,
    Policy,
    Units,
    build,
    choose,
    compute_context,
    find_units,
    set_products,
)
from surefoot.components.precision.scaler import LossScaler

__all__ = [
    "HALVES",
    "PLAIN",
    "Compute",
    "LossScaler",
    "Policy",
    "Units",
    "build",
    "choose",
    "compute_context",
    "find_units",
    "set_products",
]
