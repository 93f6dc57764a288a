"""Time per phase of a step: a clock that always runs, and windows of torch.profiler."""

from __future__ import annotations

from surefoot.components.profiler import PhaseClock, timed
from surefoot.components.profiler.tracing import Profiler, Window, analyse, draw

__all__ = ["PhaseClock", "Profiler", "Window", "analyse", "draw", "timed"]
