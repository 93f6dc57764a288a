"""Batches of one step as the loader returns them, and the memory that a batch takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np

from surefoot.components.data.feed import SampleWindow
from surefoot.components.data.in_place import find_arrays
from surefoot.components.data.loader.bad import ReadResult, UnreadableSample
from surefoot.contract.task import Batch


class StepBatches(NamedTuple):
    """Batches of step `number` for this rank: one per microbatch with samples, and their `ids`.

    `first` is the index of the first of these microbatches among those of all ranks.
    """

    number: int
    window: SampleWindow
    batches: list[Batch]
    ids: list[np.ndarray]
    bad: tuple[UnreadableSample, ...] = ()
    first: int = 0

    @classmethod
    def of(
        cls,
        number: int,
        window: SampleWindow,
        cut: Iterable[np.ndarray],
        reads: Iterable[ReadResult],
        first: int = 0,
    ) -> Self:
        """Return the batches of a step from the reads of its microbatches, with samples `cut`."""
        kept = [
            (read.batch, read.readable_ids(ids))
            for ids, read in zip(cut, reads, strict=True)
            if read.batch is not None
        ]
        bad = tuple(bad for read in reads for bad in read.bad)
        batches, ids = [batch for batch, _ in kept], [ids for _, ids in kept]
        return cls(number, window, batches, ids, bad, first)

    @property
    def num_samples(self) -> int:
        """Number of samples in the batches."""
        return sum(map(len, self.ids))


def bytes_of(batch: Batch) -> int:
    """Return the bytes of the tensors and arrays in a batch."""
    return sum(
        each.nbytes if isinstance(each, np.ndarray) else each.numel() * each.element_size()
        for each in find_arrays(batch)
    )
