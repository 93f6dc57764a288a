"""Where the time of a step goes: a clock that is always on, and windows of torch.profiler."""

from __future__ import annotations

from surefoot.components.profiler import (
    PhaseClock,
    timed,
)
from surefoot.components.profiler.tracing import (
    Profiler,
    Window,
    analyse,
    draw,
)

__all__ = [
    "PhaseClock",
    "Profiler",
    "Window",
    "analyse",
    "draw",
    "timed",
]
