"""Augmentation of whole batches of images: functions with explicit draws, and pipeline steps.

The functions take every draw as an argument; the steps (`Crop`, `Mirror`, `Jitter` ...) take the
keys of a batch, so that the augmentation of a sample depends on the run's seed, the epoch and the
sample alone. `mixup` and `cutmix` mix samples, and their labels with them.
"""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.data", __name__)
