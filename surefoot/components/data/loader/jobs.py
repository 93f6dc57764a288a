"""Jobs of the loader's workers: each job is to read a microbatch.

The result does not depend on the worker that reads it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from surefoot.components.data.feed import SampleWindow
from surefoot.components.data.loader.bad import ReadResult, UnreadableSample, read_sound
from surefoot.components.data.loader.streams import DRAWS, streams_of, streams_of_epoch
from surefoot.components.data.order import Keys, derive
from surefoot.components.data.sources.iterated import copy_of
from surefoot.contract.task import Batch, Source

Augment = Callable[[Batch, Any], Batch]


@dataclass(frozen=True, eq=False)
class Job:
    """Job of reading one microbatch: the samples `ids` (int64) of step `number`, counted from 1.

    `window` has all samples of the step. `first` is the index of this rank's first microbatch of
    the step among the microbatches of all ranks.
    """

    number: int
    window: SampleWindow
    ids: np.ndarray
    first: int = 0


@dataclass(frozen=True, eq=False)
class Reader:
    """Function that reads and augments the samples `ids` of an epoch.

    It is pure, so that any worker may call it, any number of times. A source of the user gets a
    copy of `ids`, since a source that changed the array in place would also change the record of
    the samples that the run has read.
    """

    source: Source
    augment: Augment | None
    seed: int
    skips: bool = False  # leave out unreadable samples instead of raising
    # set the random streams of torch, numpy and Python; None: only for a source that is not
    # thread-safe
    seeds: bool | None = None

    @functools.cached_property
    def _is_plain(self) -> bool:
        """True if a batch is what the source reads: it draws nothing, and all is read."""
        fixes = hasattr(self.source, "at") or hasattr(type(self.source), "seeded")
        return not (self._seeds or fixes or self.skips or self.augment is not None)

    @functools.cached_property
    def _keeps_ids(self) -> bool:
        return "_keeps_ids" in vars(type(self.source))  # a subclass may read otherwise

    @functools.cached_property
    def _seeds(self) -> bool:
        return not getattr(self.source, "thread_safe", False) if self.seeds is None else self.seeds

    def __call__(self, epoch: int, ids: np.ndarray) -> ReadResult:
        asked = ids if self._keeps_ids else ids.copy()
        if self._is_plain:
            return ReadResult(self.source.read(asked))
        source = fix_epoch(self.source, epoch, self.seed)
        with self._streams(epoch, ids):
            read = read_sound(source, ids) if self.skips else ReadResult(source.read(asked))
            if self.augment is None or read.batch is None:
                return read
            keys = Keys(self.seed, epoch, sample_ids(self.source, read.readable_ids(ids)))
            return ReadResult(self.augment(read.batch, keys), read.bad)

    def explain(self, epoch: int, ids: np.ndarray) -> dict[str, float]:
        """Measure the seconds that each part of reading these samples takes.

        The parts are those that the source reports, or `read`, and `augment`. Random draws are the
        same as in a normal read. The global random states are restored, so that the run continues
        unchanged. The result is empty for a source that is read sequentially.
        """
        if hasattr(self.source, "at"):  # it is read sequentially, and would have to restart
            return {}
        with self._streams(epoch, ids):
            if self.skips:
                ids = read_sound(self.source, ids).readable_ids(ids)
            if not len(ids):
                return {}
            own = getattr(self.source, "explain", None)
            begun_s = time.perf_counter()
            batch = self.source.read(ids.copy())
            costs: dict[str, float] = (
                {"read": time.perf_counter() - begun_s} if own is None else dict(own(ids))
            )
            if self.augment is not None:
                begun_s = time.perf_counter()
                self.augment(batch, Keys(self.seed, epoch, ids))
                costs["augment"] = time.perf_counter() - begun_s
            return costs

    def _streams(self, epoch: int, ids: np.ndarray) -> AbstractContextManager[None]:
        return (
            streams_of(derive(self.seed, epoch, *ids[:1].tolist(), DRAWS))
            if self._seeds
            else nullcontext()
        )


def sample_ids(source: Source, ids: np.ndarray) -> np.ndarray:
    """Return the numbers on which the draws of `augment` depend, for samples that were read.

    They are `ids`, but for a source whose samples are microbatches those of the samples in them.
    """
    inner = getattr(source, "inner_ids", None)
    return ids if inner is None else inner(ids)


def fix_epoch(source: Source, epoch: int, seed: int, *, keep: bool = False) -> Source:
    """Return the source for reading samples of `epoch`.

    For a source that is read sequentially, this is a reader of the epoch. The draws of a dataset
    with samples by number depend on the epoch and the sample; any other source is returned
    unchanged. With `keep`, samples are read for a check, and are not consumed.
    """
    made: Any = source
    if hasattr(source, "at"):
        made = made.at(epoch, streams_of_epoch(seed, epoch), keep=keep)
    elif hasattr(type(source), "seeded"):  # a wrapper of a source wraps the result itself
        made = made.seeded(derive(seed, epoch))
    return cast(Source, made)


def number_of(source: Source, ids: np.ndarray) -> np.ndarray:
    """Return the numbers by which the user knows samples of a source."""
    own = getattr(source, "number_of", None)
    return ids if own is None else own(ids)


def number_bad(source: Source, bad: Iterable[UnreadableSample]) -> list[UnreadableSample]:
    """Return unreadable samples with the numbers that `number_of` gives."""
    return [
        each._replace(sample=int(number_of(source, np.array([each.sample]))[0])) for each in bad
    ]


def describe_samples(source: Source, ids: np.ndarray) -> str:
    """Return the numbers of the first samples as text."""
    shown = ", ".join(map(str, number_of(source, ids[:4]).tolist()))
    return (
        f"sample {shown}"
        if len(ids) == 1
        else f"samples {shown}{', ...' if len(ids) > 4 else ''} ({len(ids)} of them)"
    )


class SomeSamples:
    """Source of the samples `numbers` of another source, counted from 0 in that order.

    With `copies`, each batch is a copy, so that code that writes into it does not change the data.
    """

    def __init__(self, source: Source, numbers: np.ndarray, *, copies: bool = False) -> None:
        self.guarantee, self.digest = source.guarantee, source.digest
        self._source, self._numbers, self._copies = source, numbers, copies

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, ids: np.ndarray) -> Batch:
        batch = self._source.read(self._numbers[ids])
        return copy_of(batch) if self._copies else batch

    def number_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of samples in the wrapped source, for messages."""
        return number_of(self._source, self._numbers[ids])

    def describe(self) -> str:
        return f"{len(self):,} of {self._source.describe()}"

    def __getattr__(self, name: str) -> Any:
        """Return an optional attribute of the wrapped source."""
        if name.startswith("_"):  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._source, name)


class SomeDrawnSamples(SomeSamples):
    """`SomeSamples` of a dataset that draws: the draws depend on the sample, as without it."""

    def seeded(self, key: int) -> Source:
        inner: Any = self._source
        return SomeSamples(inner.seeded(key), self._numbers, copies=self._copies)


def choose_samples(source: Source, numbers: np.ndarray, *, copies: bool = False) -> Source:
    """Return the source of the samples `numbers` of `source`."""
    kind = SomeDrawnSamples if hasattr(type(source), "seeded") else SomeSamples
    return kind(source, numbers, copies=copies)


def spread_samples(source: Source, count: int | None) -> Source:
    """Return the source of at most `count` samples, spread evenly over those of `source`.

    It is `source` itself for None, and if it is read sequentially.
    """
    length = len(source)
    if count is None or count >= length or source.guarantee != "proven":
        return source
    return choose_samples(source, np.arange(count, dtype=np.int64) * length // count)


def look(source: Source, epoch: int, ids: np.ndarray, seed: int) -> Batch:
    """Read samples for a check before a run, or for an evaluation, without consuming them.

    A source that is read sequentially returns these samples again in the next read.
    """
    if getattr(source, "thread_safe", False):
        return source.read(ids)
    with streams_of(derive(seed, epoch, *ids[:1].tolist(), DRAWS)):
        return fix_epoch(source, epoch, seed, keep=True).read(ids)
