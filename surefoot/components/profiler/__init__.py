"""Profiling of training.

Clocks measure the phases of a run. Counters count the FLOPs and bytes of its operators. Windows of
torch.profiler record some of its steps.
"""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.profiler", __name__)
