"""Profiler: the time of a run by phase, measured by clocks that are always on, and a context that
times one block."""

from surefoot.components.profiler.phases.clock import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    COPY,
    DATA,
    EVALUATION,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    OTHER,
    PhaseClock,
)
from surefoot.components.profiler.phases.timed import Timed, timed

__all__ = [
    "BACKWARD",
    "CHECKPOINT",
    "COMMUNICATION",
    "COPY",
    "DATA",
    "EVALUATION",
    "FORWARD",
    "LOGGING",
    "OPTIMIZER",
    "OTHER",
    "PhaseClock",
    "Timed",
    "timed",
]
