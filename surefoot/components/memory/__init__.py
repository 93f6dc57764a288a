"""Memory: activation checkpointing, offloading, chunked losses, and weights mapped from a file."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.memory", __name__)
