"""From an order to batches: which samples each step consumes, cut into microbatches. Seeks to any step at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.order import Order, Permutation, derive
from surefoot.contract.task import Batch, Source
from surefoot.core.errors import DataError

BLOCK_SAMPLES = 4096  # positions looked up at once: the cost of a look-up is then under 0.1 us a sample


class Window(NamedTuple):
    """The samples of one step: `ids` (int64) in order, the epoch they belong to, and their first position in it."""

    epoch: int
    start: int
    ids: np.ndarray


class Feed:
    """Step -> samples. A pure function of (order, batch), so the sequence does not change with workers or restarts.

    `drop_last` leaves out the short last batch of an epoch; `dropped` says how many samples that is.
    """

    def __init__(
        self, source: Source, order: Order, *, batch: int, microbatch: int | None = None, drop_last: bool = False
    ) -> None:
        self.source, self.order, self.batch = source, order, batch
        self.microbatch = microbatch or batch
        n = order.n
        self.steps_per_epoch = n // batch if drop_last else -(-n // batch)
        self.dropped = n - self.steps_per_epoch * batch if drop_last else 0
        if self.steps_per_epoch == 0:
            raise DataError(
                f"a batch of {batch} is larger than the set of {n} samples, and last_batch is 'drop'",
                hint=f'use a batch of {n} or less, or data.last_batch = "keep"',
            )
        self._epoch = -1
        self._permutation: Permutation | None = None
        self._block = np.empty(0, dtype=np.int64)
        self._block_start = 0

    def window(self, step: int) -> Window:
        """The samples of the step numbered `step`, from 0."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch
        stop = min(start + self.batch, self.order.n)
        if epoch != self._epoch or start < self._block_start or stop > self._block_start + len(self._block):
            self._look_up(epoch, start)
        offset = start - self._block_start
        return Window(epoch, start, self._block[offset : offset + stop - start])

    def _look_up(self, epoch: int, start: int) -> None:
        order = self.order
        if epoch != self._epoch:
            self._permutation = Permutation(order.n, derive(order.seed, 1, epoch)) if order.shuffle else None
            self._epoch = epoch
        positions = np.arange(start, min(start + max(self.batch, BLOCK_SAMPLES), order.n), dtype=np.int64)
        self._block = self._permutation(positions) if self._permutation is not None else positions
        self._block_start = start

    def microbatches(self, window: Window) -> list[np.ndarray]:
        """The ids of each microbatch of a step; the last one may be short."""
        if len(window.ids) <= self.microbatch:
            return [window.ids]
        return [window.ids[at : at + self.microbatch] for at in range(0, len(window.ids), self.microbatch)]

    def steps_for(self, samples: float) -> int:
        """The steps that consume so many samples, the short last batch of each epoch counted as what it is."""
        epochs, rest = divmod(samples, self.order.n - self.dropped)
        return int(epochs) * self.steps_per_epoch + min(self.steps_per_epoch, math.ceil(rest / self.batch))

    def epoch_of(self, step: int) -> float:
        """How much of the data has been seen after `step` steps, in epochs."""
        return step / self.steps_per_epoch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor in its tuples, lists and dicts on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(value, device) for value in batch)
    moved: Any = batch.to(device) if hasattr(batch, "to") else batch
    return moved


def size_of(batch: Batch) -> int:
    """Samples in a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch)
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return next((size for size in map(size_of, parts) if size), 0)
