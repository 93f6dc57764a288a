"""The prebuilt batches for trainers that own the loop.

An iterable without end, so that no epoch comes to a close while timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from torch.utils.data import IterableDataset

from benchmarks.step_cost.models import Batch, Workload


class Endless(IterableDataset[Batch]):
    """The workload's batches, in order, over and over.

    A DataLoader with `batch_size=None` hands them on as they are.
    """

    def __init__(self, workload: Workload) -> None:
        self.batches = workload.batches()

    def __iter__(self) -> Iterator[Batch]:
        return cycle(self.batches)
