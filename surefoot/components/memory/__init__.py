"""Memory savings: activation checkpointing, offloading, chunked losses, file-backed weights."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.memory", __name__)
