"""Augmentation of whole batches of images, as functions and as pipeline steps.

The functions take all random draws as arguments. The steps (`Crop`, `Mirror`, `Jitter` ...) draw
from the `Keys` of a batch. The augmentation of a sample therefore depends only on the run's seed,
the epoch and the sample. `mixup` and `cutmix` mix pairs of samples and their labels.
"""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.data", __name__)
