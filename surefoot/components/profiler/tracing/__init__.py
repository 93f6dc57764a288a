"""Recording of some steps of any loop with torch.profiler, and analysis of the trace.

The analysis lists operators, draws flame graphs, and shows memory by category.
"""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.profiler", __name__)
