"""Source that divides each batch of a user's DataLoader into microbatches, also among ranks.

Each rank draws the sample indices of all batches, from the same random states, and its DataLoader
reads only the samples of its own microbatches. To resume, only the indices are drawn again.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from surefoot.components.data.feed import Share
from surefoot.components.data.loader.streams import seed_draws, streams_of
from surefoot.components.data.order import derive
from surefoot.components.data.sources.batch_digest import PassDigest, ReadingDifference
from surefoot.components.data.sources.iterated import NOTHING, BatchRead, Iterated, Streams
from surefoot.components.data.sources.watched import ObservedLoader, as_ids
from surefoot.contract.task import Batch
from surefoot.core.errors import DataError, SpecError
from surefoot.core.ranks.pieces import check_pieces

OF_BATCH = 0x62617463  # separates the draws of a collate function from those of the samples


class Deal(NamedTuple):
    """Division of the batches of a DataLoader into microbatches.

    A step has `batches` batches of the loader. Each is divided into microbatches of `size` samples,
    at most `parts` of them, or into `parts` of equal sizes if `size` is None. `parts` is a multiple
    of the number of ranks. `share` are the microbatches of this rank. `seed` is the seed of random
    draws in the dataset.

    The microbatches of an epoch have the numbers 0 to `total` - 1. If a batch is too small for all
    of its parts, the last numbers of its step stand for no microbatch.
    """

    seed: int
    share: Share
    parts: int
    size: int | None
    batches: int
    total: int

    @property
    def step(self) -> int:
        """Largest number of microbatches of a step, of all ranks."""
        return self.parts * self.batches

    def cut(self, batches: list[list[Any]]) -> list[list[Any]]:
        """Return the samples of each microbatch of a step, from those of its batches.

        >>> Deal(0, Share(), parts=3, size=None, batches=1, total=3).cut([[5, 6, 7, 8]])
        [[5, 6], [7, 8]]
        """
        found = []
        for ids in batches:
            size = self.size or max(1, -(-len(ids) // self.parts))
            found += [ids[start : start + size] for start in range(0, len(ids), size)]
        return found

    def own(self, cut: list[list[Any]]) -> list[list[Any]]:
        """Return the microbatches of this rank, out of all of a step."""
        begin, end = self.share.of(len(cut))
        return cut[begin:end]

    def own_numbers(self, first: int) -> range:
        """Return the numbers of this rank in the step whose first number is `first`."""
        begin, end = self.share.of(min(self.step, max(self.total - first, 0)))
        return range(first + begin, first + end)

    def next_own(self, number: int) -> int:
        """Return the first number of this rank from `number` on; `total` at the end."""
        for first in range(number - number % self.step, self.total, self.step):
            own = self.own_numbers(first)
            if number < own.stop:
                return max(number, own.start)
        return self.total


class SeededIds(list[Any]):
    """Sample indices of a microbatch; iteration seeds the global random states for each sample.

    A dataset that draws from them gets numbers that depend only on `key` and the index, in any
    worker and in any microbatch. At the end the states are seeded for the collate function.
    """

    def __init__(self, ids: list[Any], key: int) -> None:
        super().__init__(ids)
        self.key = key

    def __iter__(self) -> Iterator[Any]:
        first = 0
        for position, each in enumerate(super().__iter__()):
            number = _number_of(each)
            first = first if position else number
            seed_draws(derive(self.key, number))
            yield each
        seed_draws(derive(self.key, first, OF_BATCH))

    def __reduce__(self) -> tuple[Any, ...]:
        # the default would iterate, and seed the random states of the process that sends the list
        return type(self)._made, (self.plain(), self.key)

    @classmethod
    def _made(cls, ids: list[Any], key: int) -> Self:
        return cls(ids, key)

    def plain(self) -> list[Any]:
        return [*super().__iter__()]


def _number_of(index: Any) -> int:
    try:
        return int(index)
    except (TypeError, ValueError):  # a sampler may give names or tuples
        return zlib.crc32(repr(index).encode())


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

    draws_by_sample = True

    def __init__(self, source: Iterated, deal: Deal) -> None:
        if (loader := source.loader) is None:
            raise DataError(
                f"the batches cannot be divided: {source.describe()}",
                hint="give a DataLoader with a map-style dataset",
            )
        super().__init__(loader, source.num_batches if source.is_cut else None)
        self._loader, self._deal = loader, deal
        self._sampler = _DealingSampler(loader, deal, self._watched)
        vars(self._watched.data)["batch_sampler"] = self._sampler
        self._group = -deal.step  # first number of the step whose samples are known
        self._cut: list[list[Any]] = []  # samples of its microbatches
        self._own: dict[int, list[Any]] = {}  # those of this rank, by number
        self._rows: list[BatchRead] = []  # its batches, for the ledger

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
        for row in self._rows:
            self.on_read(row)
        if keep:
            self._first = self._rows[0], None
            cut = [
                self._cut[each - first] for each in ids.tolist() if each - first < len(self._cut)
            ]
            return self._fetch_here(number, [each for part in cut for each in part], streams)
        self._first = None
        batch = self._draw() if number in self._own else None
        self._next = self._deal.next_own(number + 1)
        if self._next >= len(self) and not self.is_cut:
            self._finish()
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
        self._rows = []
        for ids in drawn:
            row = BatchRead(self._pass.epoch, self._pass.seen.count, as_ids(ids))
            self._pass.seen.add(None, ids, spots=False)
            self._rows.append(row)

    def _draw(self) -> Batch:
        assert self._iterator is not None
        assert self._pass is not None
        batch = next(self._iterator, NOTHING)
        if batch is NOTHING:
            self._iterator = None
            raise self._ended_early(self._pass.seen.count)
        return batch

    def _fetch_here(self, number: int, ids: list[Any], streams: Streams) -> Batch:
        """Read samples in this process, in addition to those that the DataLoader reads."""
        with streams(number):
            return self.collate(self._read_here(ids))

    def _read_here(self, ids: list[Any]) -> list[Any]:
        wanted, dataset = SeededIds(ids, self._sampler.key), self._loader.dataset
        many = getattr(dataset, "__getitems__", None)
        return list(many(wanted)) if many is not None else [dataset[each] for each in wanted]

    def samples_of(self, part: int, most: int) -> list[Any]:
        """Read up to `most` samples of a microbatch of the step that was drawn last, for a check.

        The global random states are seeded. The result is empty if the step has fewer microbatches.
        """
        return self._read_here(self._cut[part][:most]) if part < len(self._cut) else []

    def has_lone_sample(self) -> bool:
        """Return whether a batch of the usual size, or the last one, has a microbatch of 1."""
        batches = self._loader.batch_sampler
        size = getattr(batches, "batch_size", None)
        if not isinstance(size, int):
            return False
        try:
            last = len(batches.sampler) % size
        except (AttributeError, TypeError):
            last = 0
        sizes = [size] if not last or getattr(batches, "drop_last", False) else [size, last]
        return any(len(part) == 1 for each in sizes for part in self._deal.cut([[0] * each]))

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
        batches = list(itertools.islice(self._batches, self._deal.batches))
        if not batches:
            return False
        self.drawn.append(batches)
        if self._first >= self._skipped:
            self._waiting += self._deal.own(self._deal.cut(batches))
        self._first += self._deal.step
        return True


def make_deal(
    source: Iterated, size: int | None, num_batches: int, share: Share, seed: int
) -> Deal:
    """Return the division of steps of `num_batches` batches into microbatches of `size` samples.

    Without a size, each batch has as many equal parts as `share` has pieces. Raises SpecError if a
    rank would have no microbatch.
    """
    loader = source.loader
    if share.size > 1:
        _check_undivided(loader)
    largest = getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        parts = share.num_pieces
    elif isinstance(largest, int):
        parts = -(-largest // (size * share.size)) * share.size
    else:
        raise SpecError(
            f"train.microbatch is {size}, but the batch sampler of the DataLoader, a "
            f"{type(loader.batch_sampler).__name__}, has no batch_size",
            hint="leave train.microbatch out, or give the batch sampler the attribute batch_size, "
            "the number of samples of its largest batch",
        )
    if isinstance(largest, int) and num_batches == 1:
        check_pieces([largest], size, share.size)
    return Deal(seed, share, parts, size, num_batches, source.num_batches * parts)


def _check_undivided(loader: Any) -> None:
    """Raise SpecError for a loader whose sampler divides the samples among ranks itself."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    for sampler in (loader.batch_sampler, *samplers):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise SpecError(
                f"the {type(sampler).__name__} of the DataLoader divides the samples among ranks, "
                "and so does the run",
                hint="leave it out: DataLoader(dataset, batch_size=the batch of all ranks, "
                "shuffle=True)",
            )


def check_equal_passes(source: Iterated, deal: Deal) -> None:
    """Raise SpecError if ranks could compute different numbers of forward passes in a step.

    With synchronized BatchNorm a rank with more passes would wait for the others.
    """
    batches = source.loader.batch_sampler
    size = getattr(batches, "batch_size", 0)
    is_full = getattr(batches, "drop_last", False) or len(source.loader.dataset) % (size or 1) == 0
    cut = deal.cut([[0] * size] * deal.batches) if isinstance(size, int) else []
    if not (
        cut
        and is_full
        and len(cut) % deal.share.size == 0
        and source.num_batches % deal.batches == 0
    ):
        raise SpecError(
            'train.batchnorm is "sync", and the batches of the DataLoader do not give each of '
            f"{deal.share.size} ranks the same number of microbatches",
            hint="set drop_last=True in the DataLoader, and a batch_size that is a multiple of "
            "the number of ranks",
        )


def _draw_worker_seed(loader: Any) -> None:
    """Draw the seed of the workers, as a DataLoader does before its first batch."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
