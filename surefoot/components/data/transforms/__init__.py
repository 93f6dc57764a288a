"""Augmentation of whole batches of images: functions with explicit draws, and pipeline steps.

The functions take every draw as an argument; the steps (`Crop`, `Mirror`, `Jitter` ...) take the
keys of a batch, so that the augmentation of a sample depends on the run's seed, the epoch and the
sample alone. `mixup` and `cutmix` mix samples, and their labels with them.
"""

from surefoot.components.data.transforms.colors import (
    Jitter,
    Normalize,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    color_jitter,
    normalize,
)
from surefoot.components.data.transforms.erasing import Cutout, Erase, cutout, erase
from surefoot.components.data.transforms.mixing import cutmix, mixup, soft_targets
from surefoot.components.data.transforms.moving import (
    Mirror,
    Translate,
    crop,
    mirror,
    reflect_pad,
    translate,
)
from surefoot.components.data.transforms.pipeline import Pipeline, TransformCost
from surefoot.components.data.transforms.resizing import (
    CenterCrop,
    Crop,
    Resize,
    center_crop,
    random_resized_crop,
    resize,
)

__all__ = [
    "CenterCrop",
    "TransformCost",
    "Crop",
    "Cutout",
    "Erase",
    "Jitter",
    "Mirror",
    "Normalize",
    "Pipeline",
    "Resize",
    "Translate",
    "adjust_brightness",
    "adjust_contrast",
    "adjust_hue",
    "adjust_saturation",
    "center_crop",
    "color_jitter",
    "crop",
    "cutmix",
    "cutout",
    "erase",
    "mirror",
    "mixup",
    "normalize",
    "random_resized_crop",
    "reflect_pad",
    "resize",
    "soft_targets",
    "translate",
]
