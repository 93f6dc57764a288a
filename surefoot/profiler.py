"""Time per phase of a step: a clock that always runs, and windows of torch.profiler."""

from __future__ import annotations

from surefoot.components.profiler.phases.clock import PhaseClock
from surefoot.components.profiler.phases.timed import timed
from surefoot.components.profiler.tracing.analysis import analyse, draw
from surefoot.components.profiler.tracing.window import Profiler, Window

__all__ = ["PhaseClock", "Profiler", "Window", "analyse", "draw", "timed"]
