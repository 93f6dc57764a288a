"""Jobs of the loader's workers: each job is to read a microbatch.

The result does not depend on the worker that reads it.
"""

from __future__ import annotations

import ctypes
import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from surefoot.components.data.feed import SampleWindow
from surefoot.components.data.loader.bad import ReadResult, read_sound
from surefoot.components.data.order import Keys, derive
from surefoot.contract.task import Batch, Source

Augment = Callable[[Batch, Any], Batch]
DRAWS = 0x64726177  # separates these draws from the others of the run
_unused: list[np.random.MT19937] = []


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

    It is pure, so that any worker may call it, any number of times. The source gets a copy of
    `ids`, since a source that changed the array in place would also change the record of the
    samples that the run has read.
    """

    source: Source
    augment: Augment | None
    seed: int
    skips: bool = False  # leave out unreadable samples instead of raising
    # set the random streams of torch, numpy and Python; None: only for a source that is not
    # thread-safe
    seeds: bool | None = None

    def __call__(self, epoch: int, ids: np.ndarray) -> ReadResult:
        source = fix_epoch(self.source, epoch, self.seed)
        with self._streams(epoch, ids):
            read = read_sound(source, ids) if self.skips else ReadResult(source.read(ids.copy()))
            if self.augment is None or read.batch is None:
                return read
            return ReadResult(
                self.augment(read.batch, Keys(self.seed, epoch, read.readable_ids(ids))), read.bad
            )

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
        seeds = not getattr(self.source, "thread_safe", False) if self.seeds is None else self.seeds
        return (
            _streams_of(derive(self.seed, epoch, *ids[:1].tolist(), DRAWS))
            if seeds
            else nullcontext()
        )


def fix_epoch(source: Source, epoch: int, seed: int, *, keep: bool = False) -> Source:
    """Return the source for reading samples of `epoch`.

    For a source that is read sequentially, this is a reader of the epoch; any other source is
    returned unchanged. With `keep`, samples are read for a check, and are not consumed.
    """
    at = getattr(source, "at", None)
    made: Source = source if at is None else at(epoch, streams_of_epoch(seed, epoch), keep=keep)
    return made


def streams_of_epoch(seed: int, epoch: int) -> Callable[[int], AbstractContextManager[None]]:
    """Return a function from a batch number to a context with the random states of that batch."""
    return lambda number: _streams_of(derive(seed, epoch, number, DRAWS))


def look(source: Source, epoch: int, ids: np.ndarray, seed: int) -> Batch:
    """Read samples for a check before a run, or for an evaluation, without consuming them.

    A source that is read sequentially returns these samples again in the next read.
    """
    if getattr(source, "thread_safe", False):
        return source.read(ids)
    with _streams_of(derive(seed, epoch, *ids[:1].tolist(), DRAWS)):
        return fix_epoch(source, epoch, seed, keep=True).read(ids)


@contextmanager
def _streams_of(key: int) -> Iterator[None]:
    """Seed the global random states of torch, numpy and Python; restore them after the block.

    `key` is the seed. A dataset that draws from the global random states draws the same values in
    any worker, and different values for each key.
    """
    of_torch, of_python = torch.default_generator.get_state(), random.getstate()
    torch.default_generator.manual_seed(key >> 1)
    random.seed(key)
    try:
        with _numpy_stream_of(key):
            yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)


@contextmanager
def _numpy_stream_of(key: int) -> Iterator[None]:
    """Replace numpy's global generator by one with the seed `key`; restore it after the block.

    To restore the state of numpy's generator instead would be slow: writing its 624 words can take
    longer than reading a sample.
    """
    theirs = mtrand.get_bit_generator()  # of the user
    normal = _take_cached_normal(theirs)
    own = _unused.pop() if _unused else np.random.MT19937(0)  # a nested context needs another
    mtrand.set_bit_generator(own)
    mtrand.seed(key & 0xFFFFFFFF)
    try:
        yield
    finally:
        mtrand.set_bit_generator(theirs)
        _unused.append(own)
        if normal is not None:
            mtrand.set_state(
                {**dict(mtrand.get_state(legacy=False)), "has_gauss": 1, "gauss": normal}
            )


def _take_cached_normal(generator: Any) -> float | None:
    """Return the normal number that numpy's global generator has cached; None if there is none.

    numpy draws normal numbers in pairs, and caches the second one. The cache is lost when the
    generator is replaced. numpy returns the cached number only with all 624 words of the state,
    which takes 40 us. A draw takes 2 us. If the generator does not advance, the draw was the cached
    number; otherwise, the generator is set back.
    """
    words = _words_of(generator)
    if words is None:
        state = dict(mtrand.get_state(legacy=False))
        return state["gauss"] if state["has_gauss"] else None
    before = bytes(words)
    normal = mtrand.standard_normal()
    if bytes(words) == before:
        return float(normal)
    ctypes.memmove(words, before, len(before))
    return None


@functools.lru_cache(maxsize=1)
def _words_of(generator: Any) -> ctypes.Array[ctypes.c_uint32] | None:
    """Return the state of a Mersenne Twister in its memory: 624 words and the position.

    Returns None for a different type of generator, or if numpy stores the state differently.
    """
    state = generator.state
    if state["bit_generator"] != "MT19937":
        return None
    words = (ctypes.c_uint32 * 625).from_address(generator.ctypes.state_address)
    return words if [*words] == [*state["state"]["key"], state["state"]["pos"]] else None
