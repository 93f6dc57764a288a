"""Windows of torch.profiler around any loop, and analysis of their traces: operators, flame graphs,
memory by category."""

from surefoot.components.profiler.tracing.analysis import TraceAnalysis, analyse, draw
from surefoot.components.profiler.tracing.window import LEVELS, Profiler, Window

__all__ = ["LEVELS", "TraceAnalysis", "Profiler", "Window", "analyse", "draw"]
