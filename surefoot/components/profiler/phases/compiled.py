"""torch.compile's count of compiled graphs, to explain a slow step by compilation.

`torch._dynamo.utils.counters` is private; where torch lacks it the count is 0, and such a step is
explained by its slowest phase.
"""

from __future__ import annotations

import sys


def count_compiled() -> int:
    """Return how many frames torch.compile has handled in this process; 0 while its compiler is not
    imported."""
    loaded = sys.modules.get("torch._dynamo.utils")
    if loaded is None:
        return 0
    counters = getattr(loaded, "counters", {})
    return int(counters["frames"]["total"]) if "frames" in counters else 0
