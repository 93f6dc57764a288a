"""Metrics as partial results that can be merged."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.metrics", __name__)
