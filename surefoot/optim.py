"""Optimizers, parameter groups, the fused update, fp32 masters of narrow weights, and averages of weights."""

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
