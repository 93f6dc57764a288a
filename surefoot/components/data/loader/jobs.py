"""What is read at once: the samples of one microbatch, the same wherever it is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from surefoot.components.data.feed import Window
from surefoot.components.data.loader.bad import Read, read_sound
from surefoot.components.data.order import Keys
from surefoot.contract.task import Batch, Source

Augment = Callable[[Batch, Any], Batch]


@dataclass(frozen=True, eq=False)
class Job:
    """One microbatch of the step numbered `number`, from 1: samples `ids` (int64) of its window."""

    number: int
    window: Window
    ids: np.ndarray


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads and augments the samples `ids` of an epoch: a pure function, so it does not matter which worker calls it, nor how often."""

    source: Source
    augment: Augment | None
    seed: int
    skips: bool = False  # what cannot be read, instead of raising

    def __call__(self, epoch: int, ids: np.ndarray) -> Read:
        read = read_sound(self.source, ids) if self.skips else Read(self.source.read(ids))
        if self.augment is None or read.batch is None:
            return read
        return Read(self.augment(read.batch, Keys(self.seed, epoch, read.kept(ids))), read.bad)

    def explain(self, epoch: int, ids: np.ndarray) -> dict[str, float]:
        """The seconds that each part of reading these samples takes: as the source itself tells them, or as one."""
        if self.skips:
            ids = read_sound(self.source, ids).kept(ids)
        own = getattr(self.source, "explain", None)
        begun_s = time.perf_counter()
        batch = self.source.read(ids)
        read_s = time.perf_counter() - begun_s
        costs: dict[str, float] = {"read": read_s} if own is None else dict(own(ids))
        if self.augment is not None:
            begun_s = time.perf_counter()
            self.augment(batch, Keys(self.seed, epoch, ids))
            costs["augment"] = time.perf_counter() - begun_s
        return costs
