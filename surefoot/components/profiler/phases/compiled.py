"""The seam to torch.compile's own count of what it compiled: a step that compiled is slow for that reason.

`torch._dynamo.utils.counters` is private; where it is gone nothing counts, and such a step is told by its slowest phase.
"""

from __future__ import annotations

import sys


def count_compiled() -> int:
    """How many graphs torch.compile made in this process so far; 0 while nothing of it is loaded."""
    loaded = sys.modules.get("torch._dynamo.utils")
    if loaded is None:
        return 0
    counters = getattr(loaded, "counters", {})
    return int(counters["frames"]["total"]) if "frames" in counters else 0
