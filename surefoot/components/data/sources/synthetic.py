"""Computed samples, for experiments and tests."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError


class Synthetic:
    """Source of computed images with an adjustable delay and size, for experiments and tests.

    Sample i is an array of `shape` float32 values, drawn from a generator with the seed (seed, i).
    Its label is i modulo `num_classes`.

    Args:
        num_samples: Number of samples.
        shape: Shape of an image.
        num_classes: Number of classes.
        delay_s: Seconds that reading a sample sleeps.
        seed: Seed of all images.

    Raises:
        DataError: If there are no samples, or if the delay is negative.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True

    def __init__(
        self,
        num_samples: int,
        *,
        shape: Sequence[int] = (3, 32, 32),
        num_classes: int = 10,
        delay_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        if num_samples < 1 or delay_s < 0:
            raise DataError(
                f"{num_samples} samples with a delay of {delay_s} s are not possible",
                hint="use 1 sample or more, and 0 s or more",
            )
        self._num_samples, self._shape, self._num_classes = num_samples, tuple(shape), num_classes
        self._delay_s, self._seed = delay_s, seed
        self.digest = hashlib.sha256(
            f"{num_samples} {self._shape} {num_classes} {seed}".encode()
        ).hexdigest()

    def __len__(self) -> int:
        return self._num_samples

    def read(self, ids: np.ndarray) -> dict[str, Tensor]:
        if self._delay_s:
            time.sleep(self._delay_s * len(ids))
        images = np.empty((len(ids), *self._shape), dtype=np.float32)
        for row, number in enumerate(ids):
            images[row] = np.random.default_rng((self._seed, int(number))).random(
                self._shape, dtype=np.float32
            )
        return {
            "images": torch.from_numpy(images),
            "labels": torch.from_numpy(ids % self._num_classes),
        }

    def describe(self) -> str:
        return f"{self._num_samples:,} synthetic samples of {self._shape}, {self._delay_s} s each"
