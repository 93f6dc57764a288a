"""Process groups of a run: how ranks join, and their collectives."""

from surefoot.runtime.comm.collectives import Collective
from surefoot.runtime.comm.group import ALONE, Group
from surefoot.runtime.comm.join import join
from surefoot.runtime.comm.mesh import SOLO, Mesh, lay_out
from surefoot.runtime.comm.watched import watched

__all__ = ["ALONE", "SOLO", "Collective", "Group", "Mesh", "join", "lay_out", "watched"]
