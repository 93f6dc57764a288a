"""Records of a run, which are stored in its `events.jsonl`."""

from __future__ import annotations

from surefoot.contract.events import (
    Committed,
    Compiled,
    Dtypes,
    Ended,
    Evaluated,
    Event,
    Fault,
    Memory,
    Started,
    Step,
    find_end,
    is_finished,
    newest,
    read,
)

__all__ = [
    "Committed",
    "Compiled",
    "Dtypes",
    "Ended",
    "Evaluated",
    "Event",
    "Fault",
    "Memory",
    "Started",
    "Step",
    "find_end",
    "is_finished",
    "newest",
    "read",
]
