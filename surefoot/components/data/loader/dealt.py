"""Source that divides each batch of a user's DataLoader into microbatches, also among ranks.

Each rank draws the sample indices of all batches, from the same random states, and its DataLoader
reads only the samples of its own microbatches. To resume, only the indices are drawn again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from surefoot.components.data.loader.division import Deal, find_sizes
from surefoot.components.data.loader.streams import SeededIds, streams_of
from surefoot.components.data.order import derive
from surefoot.components.data.sources.batch_digest import PassDigest, ReadingDifference
from surefoot.components.data.sources.iterated import NOTHING, BatchRead, Iterated, Streams
from surefoot.components.data.sources.watched import ObservedLoader, as_ids
from surefoot.components.data.sources.wrapped import read_items, without_nesting
from surefoot.contract.task import Batch
from surefoot.core.errors import DataError


class DealtLoader(Iterated):
    """Source of the microbatches of the batches of a DataLoader with a map-style dataset.

    Sample i is microbatch i of the epoch. The indices of a batch are those that the DataLoader
    itself would draw. Random numbers that the dataset draws from the global random states depend on
    the seed, the epoch and the sample.

    Args:
        source: The DataLoader as a source.
        deal: The division of its batches.

    Raises:
        DataError: If the samples of its batches are not known, as for a stream.
    """

    draws_by_sample = is_divided = True

    def __init__(self, source: Iterated, deal: Deal) -> None:
        if (loader := source.loader) is None:
            raise DataError(
                f"the batches cannot be divided: {source.describe()}",
                hint="give a DataLoader with a map-style dataset",
            )
        super().__init__(loader, source.num_batches if source.is_cut else None)
        self._loader, self._deal = loader, deal
        self._sampler = _DealingSampler(loader, deal, self._watched)
        self._dataset = without_nesting(loader.dataset)
        self._watched.own |= {"batch_sampler": self._sampler, "dataset": self._dataset}
        self._watched.take_settings()
        self._group = -deal.step  # first number of the step whose samples are known
        self._cut: list[list[Any]] = []  # samples of its microbatches
        self._own: dict[int, list[Any]] = {}  # those of this rank, by number
        self._rows: list[BatchRead] = []  # its batches, for the ledger
        self._read_ids: dict[int, list[Any]] = {}  # samples by number, as they were read last

    def __len__(self) -> int:
        return self._deal.total

    def describe(self) -> str:
        name, parts = type(self._loader).__name__, self._deal.parts
        divided = f", each divided into {parts} parts" if parts > 1 else ""
        return f"{self.num_batches:,} batches of {name}{divided}, by sample index"

    @property
    def step_size(self) -> int:  # type: ignore[override]
        """Number of microbatches of a step, of all ranks."""
        return self._deal.step

    def count_step(self) -> tuple[int, int]:
        """Return the index of this rank's first microbatch in the step, and their number."""
        return self._deal.share.of(len(self._cut))[0], len(self._cut)

    def batches_of(self, numbers: list[int]) -> list[int]:
        return list(dict.fromkeys(number // self._deal.parts for number in numbers))

    def inner_ids(self, numbers: np.ndarray) -> np.ndarray:
        """Return the indices of the samples in microbatches that were read in this step.

        If they are not integers, return `numbers`.
        """
        drawn = [each for number in numbers.tolist() for each in self._read_ids.get(number, [])]
        found = as_ids(drawn)
        return np.asarray(found, dtype=np.int64) if found else numbers

    def count_samples(self, epoch: int, number: int, batch: Batch) -> int | None:
        return self._sizes.get((epoch, number))

    def _read(self, epoch: int, ids: np.ndarray, streams: Streams, *, keep: bool) -> Batch:
        number = int(ids[0])
        first = number - number % self._deal.step
        is_at = self._iterator is not None and self._pass is not None and self._pass.epoch == epoch
        if not (is_at and (first == self._group if keep else number == self._next)):
            self._advance_to(epoch, first, streams)
        if first != self._group:
            self._draw_step()
        while not keep and self._next < number:  # of a step that is read again
            self._take(self._next)
        for row in self._rows:
            self.on_read(row)
        if keep:
            self._first = self._rows[0], None
            cut = [
                self._cut[each - first] for each in ids.tolist() if each - first < len(self._cut)
            ]
            self._read_ids |= dict(zip(ids.tolist(), cut, strict=False))
            if not cut:
                return None
            return self._fetch_here(number, [each for part in cut for each in part], streams)
        self._first = None
        batch = self._take(number)
        if self._next >= len(self) and not self.is_cut:
            self._finish()
        return batch

    def _take(self, number: int) -> Batch:
        """Return the next microbatch of this rank; None if the step has no such microbatch."""
        self._read_ids[number] = self._own.get(number, [])
        batch = self._draw() if number in self._own else None
        self._next = self._deal.next_own(number + 1)
        return batch

    def _advance_to(self, epoch: int, number: int, streams: Streams) -> None:
        """Start the epoch, and draw the indices of the steps before microbatch `number` again."""
        self._begin(epoch, 0)
        assert self._pass is not None
        self._group, self._next = -self._deal.step, self._deal.next_own(0)
        self._sampler.begin(derive(self._deal.seed, epoch), number, streams)
        self._iterator = self._watched.iterate(starts_workers=self._pass.starts_workers)
        self._pass.starts_workers = self._watched.starts_workers
        while self._group + self._deal.step < number:
            self._draw_step()
        self._next = self._deal.next_own(number)

    def _draw_step(self) -> None:
        """Take the sample indices of the batches of the next step."""
        assert self._pass is not None
        drawn = self._sampler.take_step()
        if not drawn:
            raise self._ended_early(self._pass.seen.count)
        self._group += self._deal.step
        self._cut = self._deal.cut(drawn)
        own = self._deal.own(self._cut)
        self._own = dict(zip(self._deal.own_numbers(self._group), own, strict=False))
        known = {self._group + place: part for place, part in enumerate(self._cut)} | self._own
        self._sizes = {(self._pass.epoch, number): len(part) for number, part in known.items()}
        self._rows, self._read_ids = [], {}
        for ids in drawn:
            row = BatchRead(self._pass.epoch, self._pass.seen.count, as_ids(ids))
            self._pass.seen.add(None, ids, spots=False)
            self._rows.append(row)

    def _draw(self) -> Batch:
        assert self._iterator is not None
        assert self._pass is not None
        if not self._loader.num_workers:
            SeededIds(self._own[self._next], self._sampler.key).seed()
        try:
            batch = next(self._iterator, NOTHING)
        except BaseException:
            self._iterator = None  # the step is read again
            raise
        if batch is NOTHING:
            self._iterator = None
            raise self._ended_early(self._pass.seen.count)
        return batch

    def _fetch_here(self, number: int, ids: list[Any], streams: Streams) -> Batch:
        """Read samples in this process, in addition to those that the DataLoader reads."""
        with streams(number):
            return self.collate(self._read_here(ids))

    def _read_here(self, ids: list[Any]) -> list[Any]:
        wanted = SeededIds(ids, self._sampler.key)
        wanted.seed()
        return read_items(self._dataset, wanted)

    def samples_of(self, part: int, end: int, start: int = 0) -> list[Any]:
        """Read samples `start` to `end` of a microbatch of the step drawn last, for a check.

        The global random states are seeded. The result is empty if the step has fewer microbatches.
        """
        return self._read_here(self._cut[part][start:end]) if part < len(self._cut) else []

    def batch_sizes(self) -> list[int]:
        """Return the usual number of samples of a batch, and that of a short last one.

        The result is empty if the batch sampler does not say them.
        """
        return find_sizes(self._loader)

    def count_cut(self, size: int) -> int:
        """Return the number of microbatches of a batch of `size` samples."""
        return len(self._deal.cut([[0] * size]))

    def has_lone_sample(self) -> bool:
        """Return whether a batch of the usual size, or the last one, has a microbatch of 1."""
        return any(
            len(part) == 1 for size in self.batch_sizes() for part in self._deal.cut([[0] * size])
        )

    def read_lone_sample(self) -> Batch:
        """Read one sample of the step that was drawn last, as a batch, for a check."""
        with streams_of(0):
            return self.collate(self.samples_of(0, 1))

    def collate(self, samples: list[Any]) -> Batch:
        return self._loader.collate_fn(samples)

    def describe_sizes(self) -> str:
        sizes = sorted({len(part) for part in self._cut})
        return " or ".join(map(str, sizes))

    def _is_beginning_of(self, saved: Any) -> bool:
        return False  # the indices are drawn again

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "draws": "sample"}

    def _compare_first(self, expected: Any, streams: Streams) -> ReadingDifference | None:
        found = self._begun
        if found is None or found[0] != expected.epoch:
            with streams(0), self.keep_generators():
                self._watched.restore_generators(expected.generators)
                self._watched.set_epoch(expected.epoch)
                if expected.starts_workers or not self._watched.has_lasting_workers:
                    _draw_worker_seed(self._loader)
                ids = next(iter(self._loader.batch_sampler), NOTHING)
            if ids is NOTHING:
                return None
            seen = PassDigest()
            seen.add(None, ids, spots=False)
            found = expected.epoch, seen
        return found[1].compare_first(expected.seen)


class _DealingSampler:
    """Batch sampler of a DataLoader that gives the samples of this rank's microbatches.

    It delegates everything else to the loader's own batch sampler.
    """

    def __init__(self, loader: Any, deal: Deal, watched: ObservedLoader) -> None:
        self._loader, self._inner = loader, loader.batch_sampler
        self._deal, self._watched = deal, watched
        self.key, self._skipped = 0, 0
        self._streams: Streams | None = None
        self._steps: _Steps | None = None

    def begin(self, key: int, skipped: int, streams: Streams) -> None:
        """Prepare an epoch, in which no sample before microbatch `skipped` is read."""
        self.key, self._skipped, self._streams, self._steps = key, skipped, streams, None

    def take_step(self) -> list[list[Any]]:
        """Return the indices of each batch of the next step that was not returned before.

        The result is empty at the end of the epoch.
        """
        assert self._steps is not None
        if not self._steps.drawn and not self._steps.draw():
            return []
        return self._steps.drawn.popleft()

    def __iter__(self) -> Iterator[SeededIds]:
        assert self._streams is not None
        self._steps = _Steps(self._batches(), self._deal, self.key, self._skipped)
        return self._steps

    def _batches(self) -> Iterator[list[Any]]:
        """Yield the indices of each batch, drawn as a DataLoader in one process draws them."""
        assert self._streams is not None
        watched, inner = self._watched, iter(())
        for number in itertools.count():
            with self._streams(number):
                if number == 0:
                    if self._loader.generator is None and (
                        watched.starts_workers or not watched.has_lasting_workers
                    ):
                        _draw_worker_seed(self._loader)
                    inner = iter(self._inner)
                ids = next(inner, NOTHING)
            if ids is NOTHING:
                return
            yield list(ids)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Steps(Iterator[SeededIds]):
    """Iterator over this rank's microbatches; `drawn` are the batches of steps not taken yet."""

    def __init__(self, batches: Iterator[list[Any]], deal: Deal, key: int, skipped: int) -> None:
        self._batches, self._deal, self._key, self._skipped = batches, deal, key, skipped
        self.drawn: deque[list[list[Any]]] = deque()
        self._waiting: deque[list[Any]] = deque()
        self._first = 0

    def __next__(self) -> SeededIds:
        while not self._waiting:
            if not self.draw():
                raise StopIteration
        # not before: whoever looks into a waiting one would seed the global random states
        return SeededIds(self._waiting.popleft(), self._key)

    def draw(self) -> bool:
        """Draw the batches of one step; return False at the end of the epoch."""
        left = (self._deal.total - self._first) // self._deal.parts
        # beyond the end of the epoch, batches are drawn to be reported
        wanted = min(self._deal.batches, left) if left > 0 else self._deal.batches
        batches = list(itertools.islice(self._batches, wanted))
        if not batches:
            return False
        self.drawn.append(batches)
        if self._first >= self._skipped:
            self._waiting += self._deal.own(self._deal.cut(batches))
        self._first += self._deal.step
        return True


def _draw_worker_seed(loader: Any) -> None:
    """Draw the seed of the workers, as a DataLoader does before its first batch."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
