"""Profiling of training.

Clocks measure the phases of a run, counters the FLOPs and bytes of its operators, and windows of
torch.profiler record some of its steps.
"""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.profiler", __name__)
