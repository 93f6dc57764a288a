"""Stability: non-finite steps, diverged runs, the gradient noise scale, and norms that do not mix
samples."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.stability", __name__)
