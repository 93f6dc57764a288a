"""From the records of a run to what they mean."""

from surefoot.control.diagnose.attempts import Attempt, Goodput, find_goodput
from surefoot.control.diagnose.phases import Phase, Phases, Spread, find_phases

__all__ = ["Attempt", "Goodput", "Phase", "Phases", "Spread", "find_goodput", "find_phases"]
