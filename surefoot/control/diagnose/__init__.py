"""From the records of a run to what they mean."""

from surefoot.control.diagnose.attempts import Attempt, Goodput, find_goodput
from surefoot.control.diagnose.memory import Measured, MemoryUse, Remedy, Shape, find_memory_use
from surefoot.control.diagnose.phases import Phase, Phases, Spread, find_phases
from surefoot.control.diagnose.stragglers import Waits, find_waits

__all__ = [
    "Attempt", "Goodput", "Measured", "MemoryUse", "Phase", "Phases", "Remedy", "Shape", "Spread", "Waits", "find_goodput",
    "find_memory_use", "find_phases", "find_waits",
]  # fmt: skip
