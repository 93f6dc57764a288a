"""Handwritten digits: scikit-learn's 1,797 images of 8 x 8 pixels, a small convolutional net, translation by parts of a pixel.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

# B batch, C channels, H height, W width

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.sources import Arrays
from surefoot.components.metrics import Mean, accuracy
from surefoot.contract.task import Loss
from surefoot.core.errors import DataError, MissingExtra

if TYPE_CHECKING:
    from surefoot.components.data.order import Keys

__all__ = ["Digits"]

SIZE = 8  # pixels a side
TEST_EVERY = 5  # every fifth image of the set sorted by digit: 360 of 1,797, stratified and the same for every seed


class Digits:
    """Ten digits; `width` channels in the first of three convolutions, translation by up to `shift` pixels while training.

    Batches are (images (B, 1, 8, 8), 0 is blank and 1 is ink, labels (B,)). Raises MissingExtra without scikit-learn.
    """

    def __init__(self, width: int = 32, shift: float = 1.0) -> None:
        if width < 1 or not 0 <= shift < SIZE:
            raise ValueError(f"width {width} and shift {shift}: use a width of 1 or more and a shift from 0 to under {SIZE}")
        self.width, self.shift = width, shift

    def model(self) -> nn.Module:
        wide = 2 * self.width
        return nn.Sequential(
            *_convolution(1, self.width),
            *_convolution(self.width, wide),
            nn.MaxPool2d(2),
            *_convolution(wide, wide),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(wide * (SIZE // 4) ** 2, 10),
        )

    def data(self, split: str) -> Arrays:
        if split not in ("train", "test"):
            raise DataError(f"digits has no split {split!r}", hint='use "train" or "test"')
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise MissingExtra("scikit-learn", extra="demo", needed_for="the task digits") from None
        pixels, labels = load_digits(return_X_y=True)  # 0 to 16, 0 to 9
        is_test = np.zeros(len(labels), dtype=bool)
        is_test[np.argsort(labels, kind="stable")[::TEST_EVERY]] = True
        chosen = is_test if split == "test" else ~is_test
        images = (pixels[chosen] / 16.0).astype(np.float32).reshape(-1, 1, SIZE, SIZE)
        return Arrays(images, labels[chosen].astype(np.int64))

    def augment(self, batch: tuple[Tensor, Tensor], keys: Keys) -> tuple[Tensor, Tensor]:
        """Move each image by its own way, up to `shift` pixels up, down, left and right, linear between pixels; what comes in is blank."""
        images, labels = batch
        moves = (keys.uniform(2) * 2.0 - 1.0).to(images.device) * self.shift
        down, across = _moved(moves[:, :1]), _moved(moves[:, 1:])
        return down @ images @ across.transpose(-1, -2), labels

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = model(batch[0])
        return logits

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch[1])}


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()


def _moved(moves: Tensor) -> Tensor:
    """Matrices (B, 1, 8, 8) that move the 8 rows of an image by `moves` (B, 1) pixels: row i is what stood at i + move."""
    along = torch.arange(SIZE, device=moves.device, dtype=moves.dtype)
    apart = along[:, None] + moves[:, :, None, None] - along
    return (1.0 - apart.abs()).clamp(min=0.0)
