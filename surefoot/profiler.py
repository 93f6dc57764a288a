"""Profiling of training: a clock for the phases of a step, and windows of torch.profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.components.profiler.phases.clock import PhaseClock
from surefoot.components.profiler.phases.timed import timed
from surefoot.components.profiler.tracing.analysis import analyze, draw
from surefoot.components.profiler.tracing.window import Profiler, Window
from surefoot.core.old_homes import renamed_in

if not TYPE_CHECKING:
    __getattr__ = renamed_in(__name__)

__all__ = ["PhaseClock", "Profiler", "Window", "analyze", "draw", "timed"]
