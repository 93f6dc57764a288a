"""Windows of torch.profiler around any loop, and analysis of their traces: operators, flame graphs,
memory by category."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.profiler", __name__)
