"""What is read at once: the samples of one microbatch, the same wherever it is read."""

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

from surefoot.components.data.feed import Window
from surefoot.components.data.loader.bad import Read, read_sound
from surefoot.components.data.order import Keys, derive
from surefoot.contract.task import Batch, Source

Augment = Callable[[Batch, Any], Batch]
DRAWS = 0x64726177  # sets these draws apart from the run's others
_unused: list[np.random.MT19937] = []


@dataclass(frozen=True, eq=False)
class Job:
    """One microbatch of the step numbered `number`, from 1: samples `ids` (int64) of its window; `first`: see Taken."""

    number: int
    window: Window
    ids: np.ndarray
    first: int = 0


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads and augments the samples `ids` of an epoch: a pure function, so it does not matter which worker calls it, nor how often.

    A source is given a copy of `ids`: one that sorts them in place, or counts them from 1, would change what the run says it read.
    """

    source: Source
    augment: Augment | None
    seed: int
    skips: bool = False  # what cannot be read, instead of raising
    seeds: bool | None = None  # the streams of torch, numpy and Python; None: for a source that several threads may not read

    def __call__(self, epoch: int, ids: np.ndarray) -> Read:
        source = of_epoch(self.source, epoch, self.seed)
        with self._streams(epoch, ids):
            read = read_sound(source, ids) if self.skips else Read(source.read(ids.copy()))
            if self.augment is None or read.batch is None:
                return read
            return Read(self.augment(read.batch, Keys(self.seed, epoch, read.kept(ids))), read.bad)

    def explain(self, epoch: int, ids: np.ndarray) -> dict[str, float]:
        """The seconds that each part of reading these samples takes: as the source itself tells them, or as one.

        What is drawn meanwhile is drawn as when they are read, so that a run that was looked at goes on as it would have.
        """
        if hasattr(self.source, "at"):  # it is read forwards, and would have to begin anew
            return {}
        with self._streams(epoch, ids):
            if self.skips:
                ids = read_sound(self.source, ids).kept(ids)
            if not len(ids):
                return {}
            own = getattr(self.source, "explain", None)
            begun_s = time.perf_counter()
            batch = self.source.read(ids.copy())
            costs: dict[str, float] = {"read": time.perf_counter() - begun_s} if own is None else dict(own(ids))
            if self.augment is not None:
                begun_s = time.perf_counter()
                self.augment(batch, Keys(self.seed, epoch, ids))
                costs["augment"] = time.perf_counter() - begun_s
            return costs

    def _streams(self, epoch: int, ids: np.ndarray) -> AbstractContextManager[None]:
        seeds = not getattr(self.source, "thread_safe", False) if self.seeds is None else self.seeds
        return _streams_of(derive(self.seed, epoch, *ids[:1].tolist(), DRAWS)) if seeds else nullcontext()


def of_epoch(source: Source, epoch: int, seed: int, *, keep: bool = False) -> Source:
    """Return the source as it is read in `epoch`: what is read forwards must know its pass, all else is the same in each.

    With `keep` what is read is not consumed: it is read for a check.
    """
    at = getattr(source, "at", None)
    made: Source = source if at is None else at(epoch, streams_of_epoch(seed, epoch), keep=keep)
    return made


def streams_of_epoch(seed: int, epoch: int) -> Callable[[int], AbstractContextManager[None]]:
    """Return what sets the global random streams to those of a batch of an epoch, by its number."""
    return lambda number: _streams_of(derive(seed, epoch, number, DRAWS))


def look(source: Source, epoch: int, ids: np.ndarray, seed: int) -> Batch:
    """Read samples for a check before a run, or for an evaluation: a source that is read forwards gives them again afterwards."""
    if getattr(source, "thread_safe", False):
        return source.read(ids)
    with _streams_of(derive(seed, epoch, *ids[:1].tolist(), DRAWS)):
        return of_epoch(source, epoch, seed, keep=True).read(ids)


@contextmanager
def _streams_of(key: int) -> Iterator[None]:
    """A dataset that draws from the streams of torch, numpy or Python draws the same in any worker, and no two workers draw alike."""
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
    """Set another generator behind numpy's global stream meanwhile: to write 624 words back costs more than many a sample."""
    theirs = mtrand.get_bit_generator()  # the user's
    normal = _held_normal(theirs)
    own = _unused.pop() if _unused else np.random.MT19937(0)  # one within another has its own
    mtrand.set_bit_generator(own)
    mtrand.seed(key & 0xFFFFFFFF)
    try:
        yield
    finally:
        mtrand.set_bit_generator(theirs)
        _unused.append(own)
        if normal is not None:
            mtrand.set_state({**dict(mtrand.get_state(legacy=False)), "has_gauss": 1, "gauss": normal})


def _held_normal(generator: Any) -> float | None:
    """Take the second of a pair of normal numbers from numpy's global stream, which loses it with its generator; None: it holds none.

    numpy tells it with all 624 words of its state, which takes 40 us. To draw a number tells it in 2: the generator stands still
    where one was held, and is put back where it moved.
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
    """Return the 624 words and the position of a Mersenne Twister where they lie; None for another, or if they lie elsewhere."""
    state = generator.state
    if state["bit_generator"] != "MT19937":
        return None
    words = (ctypes.c_uint32 * 625).from_address(generator.ctypes.state_address)
    return words if [*words] == [*state["state"]["key"], state["state"]["pos"]] else None
