"""Seeds of the random draws in the forward passes of a step, such as those of dropout."""

from __future__ import annotations

import random

import numpy as np
import torch

from surefoot.components.data.feed import Feed
from surefoot.components.data.order import derive, mix


class StepDraws:
    """Random generators that are seeded before each forward pass of a step.

    NumPy and Python are seeded only on several ranks (`splits`) or with several microbatches, where
    any number of ranks must draw the same. Otherwise checkpoints hold their states, and seeding
    would take a tenth of a step of a small model.
    """

    def __init__(self, seed: int, device: torch.device, feed: Feed, *, splits: bool) -> None:
        self._key, self._feed, self._splits = derive(seed, 3), feed, splits
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])

    def seed(self, number: int, microbatch: int, update: int) -> None:
        """Seed the draws of a pass: of step `number`, and of `microbatch` among those of all ranks.

        `update` is the index of the update in the step.
        """
        key = mix(self._key ^ (number << 24 | microbatch << 8 | update)) >> 1
        for generator in self._generators:
            generator.manual_seed(key)
        if self._splits or self._feed.is_cut:
            np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the masks of wav2vec 2.0 are drawn so
            random.seed(key)
