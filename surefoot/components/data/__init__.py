"""Data sources, the sample order, and the random draws of augmentation."""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.data", __name__)
