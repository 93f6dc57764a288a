"""The ranks of a run: how they come together, and what they tell each other."""

from surefoot.runtime.comm.group import ALONE, Group
from surefoot.runtime.comm.join import join

__all__ = ["ALONE", "Group", "join"]
