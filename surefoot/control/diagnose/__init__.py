"""Diagnoses of a run from its event records: goodput, health, memory, phases and stragglers."""

from surefoot.control.diagnose.attempts import Attempt, Goodput, find_goodput
from surefoot.control.diagnose.causes import find_fault, with_first_causes
from surefoot.control.diagnose.health import Health, find_health
from surefoot.control.diagnose.memory_peak import (
    MeasuredMemory,
    MemoryUse,
    Remedy,
    Shape,
    find_memory_use,
)
from surefoot.control.diagnose.phases import Phase, Phases, Spread, find_phases
from surefoot.control.diagnose.stragglers import Waits, find_waits

__all__ = [
    "Attempt",
    "Goodput",
    "Health",
    "MeasuredMemory",
    "MemoryUse",
    "Phase",
    "Phases",
    "Remedy",
    "Shape",
    "Spread",
    "Waits",
    "find_fault",
    "find_goodput",
    "find_health",
    "find_memory_use",
    "find_phases",
    "find_waits",
    "with_first_causes",
]
