"""What memory a run holds: of the process, and of the device where that has its own."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch


def peak_resident_bytes() -> int:
    """The largest resident size of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def take_device_memory(device: torch.device) -> dict[str, int]:
    """What the allocator of this GPU held since the last call, and begin anew; nothing for a device that has no memory of its own.

    `allocated_bytes` and `reserved_bytes` are those of now, `fragmented_bytes` their difference, `peak_bytes` and
    `peak_reserved_bytes` the largest meanwhile; `num_retries` counts, since the process began, how often memory had to be given back
    before an allocation went through; `total_bytes` is what the GPU has. See torch.cuda.memory_stats.
    """
    if device.type != "cuda":
        return {}
    stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return {
        "allocated_bytes": allocated["current"], "reserved_bytes": reserved["current"],
        "fragmented_bytes": reserved["current"] - allocated["current"], "peak_bytes": allocated["peak"],
        "peak_reserved_bytes": reserved["peak"], "num_retries": stats["num_alloc_retries"],
        "total_bytes": torch.cuda.get_device_properties(device).total_memory,
    }  # fmt: skip
