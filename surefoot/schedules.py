"""Learning rate schedules, each a function of the step."""

from __future__ import annotations

from surefoot.core.schedule.curves import (
    Plateau,
    constant,
    cosine,
    cosine_restarts,
    exponential,
    inverse_square_root,
    linear,
    multi_step,
    one_cycle,
    one_cycle_momentum,
    polynomial,
    scale_to_batch,
    sequence,
    step_decay,
    warmup,
    warmup_stable_decay,
)

__all__ = [
    "Plateau",
    "constant",
    "cosine",
    "cosine_restarts",
    "exponential",
    "inverse_square_root",
    "linear",
    "multi_step",
    "one_cycle",
    "one_cycle_momentum",
    "polynomial",
    "scale_to_batch",
    "sequence",
    "step_decay",
    "warmup",
    "warmup_stable_decay",
]
