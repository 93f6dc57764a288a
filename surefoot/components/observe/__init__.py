"""Throughput meter, and the writers and displays that read the event stream."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.observe", __name__)
