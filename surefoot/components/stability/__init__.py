"""Training stability: non-finite steps, divergence, the gradient noise scale, and BatchNorm."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.stability", __name__)
