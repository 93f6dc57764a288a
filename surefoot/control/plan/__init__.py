"""Predictions for runs: communication time, checkpoint intervals and memory of ZeRO stages."""

from surefoot.control.plan.communication import (
    COLLECTIVES,
    Link,
    best_bucket_bytes,
    bus_factor,
    fit_link,
    reduce_s,
)
from surefoot.control.plan.saving import SaveAdvice, advise_interval
from surefoot.control.plan.sharding import Sharding, compare_stages

__all__ = [
    "COLLECTIVES",
    "Link",
    "SaveAdvice",
    "Sharding",
    "advise_interval",
    "best_bucket_bytes",
    "bus_factor",
    "compare_stages",
    "fit_link",
    "reduce_s",
]
