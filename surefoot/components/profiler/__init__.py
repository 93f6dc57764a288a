"""Profiler: the time of a run by phase, measured by clocks that are always on, and a context that
times one block."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.profiler", __name__)
