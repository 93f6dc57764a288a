"""Memory that a run uses: the memory of its process, and that of its GPU."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch


def peak_resident_bytes() -> int:
    """Return the peak resident set size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def take_device_memory(device: torch.device) -> dict[str, int]:
    """Return the memory statistics of a GPU and reset its peaks; for a CPU, return an empty dict.

    `allocated_bytes` and `reserved_bytes` are current values, and `fragmented_bytes` is their
    difference. `peak_bytes` and `peak_reserved_bytes` are the peaks since the last call of this
    function. `num_retries` is the number of times, since the process started, that cached memory
    was freed before an allocation succeeded. `total_bytes` is the memory of the GPU. See
    torch.cuda.memory_stats.
    """
    if device.type != "cuda":
        return {}
    stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return {
        "allocated_bytes": allocated["current"],
        "reserved_bytes": reserved["current"],
        "fragmented_bytes": reserved["current"] - allocated["current"],
        "peak_bytes": allocated["peak"],
        "peak_reserved_bytes": reserved["peak"],
        "num_retries": stats["num_alloc_retries"],
        "total_bytes": torch.cuda.get_device_properties(device).total_memory,
    }
