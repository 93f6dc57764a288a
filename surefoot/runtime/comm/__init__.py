"""Process groups of a run: how ranks join, and their collectives."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.parallel", __name__)
