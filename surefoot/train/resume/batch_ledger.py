"""Ledger for data that come as whole batches: sample ids of each batch, or else its digest."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from surefoot.components.data.feed import Feed
from surefoot.components.data.sources.iterated import BatchRead, Iterated
from surefoot.contract import ledger, loop_ledger
from surefoot.contract.ledger import FILE
from surefoot.contract.loop_ledger import LoopLedger


class BatchLedger:
    """Ledger of the batches of an iterable that each step consumed; raises as LoopLedger does."""

    def __init__(self, folder: Path, source: Iterated, feed: Feed, generation: int) -> None:
        self._folder, self._feed, self._source = folder, feed, source
        self._file = LoopLedger(folder, source.promise, generation)
        self._read: dict[tuple[int, int], BatchRead] = {}  # batches read since the last step
        source.on_read = self._remember

    def _remember(self, row: BatchRead) -> None:
        self._read[row.epoch, row.number] = row

    def add(self, step: int, numbers: np.ndarray) -> None:
        """Add the batches of a step, given by the indices of its samples in the epoch."""
        epoch, _ = self._feed.find_position(step - 1)
        for number in self._source.batches_of(numbers.tolist()):
            row = self._read.get((epoch, number))
            self._file.add(step, epoch, number, () if row is None else row.ids)
        self._read.clear()

    def count_lost(self, step: int) -> int:
        """Return the number of steps up to `step` that are missing at the end of the ledger."""
        kept = ledger.consumed(loop_ledger.read(self._folder))[0]
        return max(0, step - max((row.step for row in kept), default=0))

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def takes_batches(folder: Path) -> bool:
    """Return whether the ledger of a run over an iterable records batches instead of samples.

    A resumed run keeps the format of its ledger.
    """
    return loop_ledger.is_loop_run(folder) or not (folder / FILE).exists()
