"""Optimizers, parameter groups, fused optimizer steps, fp32 master weights, weight averages."""

from __future__ import annotations

from surefoot.components.optim import (
    Adam8bit,
    FlatMuon,
    GuardedUpdate,
    Lamb,
    Lars,
    WeightAverage,
    build_groups,
    find_trained,
    master_of,
    publish,
    store_narrow,
)

__all__ = [
    "Adam8bit",
    "FlatMuon",
    "GuardedUpdate",
    "Lamb",
    "Lars",
    "WeightAverage",
    "build_groups",
    "find_trained",
    "master_of",
    "publish",
    "store_narrow",
]
