"""Handwritten digits: scikit-learn's 1,797 images of 8 x 8 pixels and a small convolutional net.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998.
"""

# B batch, C channels, H height, W width

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.metrics import Mean, accuracy
from surefoot.contract.task import Loss
from surefoot.core.errors import DataError, require_package

if TYPE_CHECKING:
    from surefoot.components.data.order import Keys

__all__ = ["Digits"]

SIZE = 8  # pixels a side
VIEWS = ((0.0, 0.0), (1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0))
# every fifth image of the set sorted by digit: 360 of 1,797, stratified and the same for every seed
TEST_EVERY = 5


class Digits:
    """Classification of handwritten digits.

    `width` is the number of channels of the first of three convolutions, `shift` the largest random
    translation in pixels during training. Evaluation averages the logits of five views: the image,
    and the image moved by `reach` pixels up, down, left and right (0: one view). Batches are
    (images (B, 1, 8, 8), 0 is blank and 1 is ink, labels (B,)). Raises MissingExtra without
    scikit-learn.
    """

    def __init__(
        self, width: int = 32, shift: float = 1.0, dropout: float = 0.25, reach: float = 0.5
    ) -> None:
        if width < 1 or not 0 <= shift < SIZE or not 0 <= reach < SIZE or not 0 <= dropout < 1:
            raise ValueError(
                f"width {width}, shift {shift}, dropout {dropout}, reach {reach}: "
                f"use a width of 1 or more, a shift and a reach from 0 to under {SIZE}, "
                "a dropout from 0 to under 1"
            )
        self.width, self.shift, self.dropout, self.reach = width, shift, dropout, reach

    def model(self) -> nn.Module:
        wide = 2 * self.width
        return nn.Sequential(
            *_convolution(1, self.width),
            *_convolution(self.width, wide),
            nn.MaxPool2d(2),
            *_convolution(wide, wide),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(wide * (SIZE // 4) ** 2, 10),
        )

    def data(self, split: str) -> Arrays:
        if split not in ("train", "test"):
            raise DataError(f"digits has no split {split!r}", hint='use "train" or "test"')
        pixels, labels = _read()
        is_test = np.zeros(len(labels), dtype=bool)
        is_test[np.argsort(labels, kind="stable")[::TEST_EVERY]] = True
        chosen = is_test if split == "test" else ~is_test
        images = (pixels[chosen] / 16.0).astype(np.float32).reshape(-1, 1, SIZE, SIZE)
        return Arrays(images, labels[chosen].astype(np.int64))

    def augment(self, batch: tuple[Tensor, Tensor], keys: Keys) -> tuple[Tensor, Tensor]:
        """Translate each image by a random offset of up to `shift` pixels, interpolated linearly.

        The border is filled with blank pixels.
        """
        images, labels = batch
        moves = (keys.uniform(2) * 2.0 - 1.0) * self.shift
        return _move(images, moves), labels

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images = batch[0]
        if model.training or not self.reach:
            logits: Tensor = model(images)
            return logits
        views = images.new_tensor(VIEWS) * self.reach
        return torch.stack(
            [model(_move(images, view.expand(len(images), 2))) for view in views]
        ).mean(0)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch[1])}


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()


def _read() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (N, 64), 0 to 16, and labels (N,), 0 to 9, of scikit-learn's `load_digits`.

    They are read from scikit-learn's file if it is at its usual path: importing scikit-learn takes
    a second of CPU time, reading the file takes a tenth of a second.
    """
    found = importlib.util.find_spec("sklearn")
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    with require_package("scikit-learn", "sklearn", extra="demo", needed_for="the task digits"):
        from sklearn.datasets import load_digits
    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


def _move(images: Tensor, moves: Tensor) -> Tensor:
    """Return images (B, 1, 8, 8) moved up and left by `moves` (B, 2) pixels.

    Pixels are interpolated linearly.
    """
    along = torch.arange(SIZE, device=images.device, dtype=images.dtype)
    # (B, 2, 8, 8): distance of pixel j from the source of pixel i
    apart = along[:, None] + moves[:, :, None, None] - along
    weights = (1.0 - apart.abs()).clamp(min=0.0)
    return weights[:, :1] @ images @ weights[:, 1:].transpose(-1, -2)
