"""Optimizers, parameter groups, fused optimizer steps, fp32 master weights, weight averages."""

from __future__ import annotations

from surefoot.components.optim.average import WeightAverage
from surefoot.components.optim.groups import build_groups, find_trained
from surefoot.components.optim.kinds.eight_bits import Adam8bit
from surefoot.components.optim.kinds.layerwise import Lamb, Lars
from surefoot.components.optim.kinds.muon import FlatMuon
from surefoot.components.optim.masters import publish, store_narrow
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.state import master_of

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
