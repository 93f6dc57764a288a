"""Process groups of a run: the rendezvous of the ranks, and their collectives."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.parallel", __name__)
