"""From the records of a run to what they mean."""

from surefoot.control.diagnose.attempts import Attempt, Goodput, find_goodput

__all__ = ["Attempt", "Goodput", "find_goodput"]
