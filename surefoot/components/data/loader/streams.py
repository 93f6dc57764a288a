"""Random states of torch, numpy and Python for reading samples, seeded by what is read."""

from __future__ import annotations

import ctypes
import functools
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import numpy as np
import torch
from numpy.random import mtrand

from surefoot.components.data.order import derive

DRAWS = 0x64726177  # separates these draws from the others of the run
OF_BATCH = 0x62617463  # separates the draws of a collate function from those of the samples
_unused: list[np.random.MT19937] = []


def streams_of_epoch(seed: int, epoch: int) -> Callable[[int], AbstractContextManager[None]]:
    """Return a function from a batch number to a context with the random states of that batch."""
    return lambda number: streams_of(derive(seed, epoch, number, DRAWS))


@contextmanager
def streams_of(key: int) -> Iterator[None]:
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


def seed_draws(key: int) -> None:
    """Seed the global random states of torch, numpy and Python, and leave them so."""
    torch.default_generator.manual_seed(key >> 1)
    random.seed(key)
    mtrand.seed(key & 0xFFFFFFFF)


def read_states() -> tuple[Any, ...]:
    """Return the global random states of torch, numpy and Python, for a comparison."""
    words = _words_of(mtrand.get_bit_generator())
    of_numpy = repr(mtrand.get_state(legacy=False)) if words is None else bytes(words)
    return torch.default_generator.get_state().numpy().tobytes(), of_numpy, random.getstate()


class SeededIds(list[Any]):
    """Sample indices of a microbatch; iteration seeds the global random states for each sample.

    A dataset that draws from them gets numbers that depend only on `key` and the index, in any
    worker and in any microbatch. At the end the states are seeded for the collate function. They
    are seeded as well when a worker receives the indices, since a dataset with `__getitems__` may
    not iterate over them.
    """

    def __init__(self, ids: list[Any], key: int) -> None:
        super().__init__(ids)
        self.key = key

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            seed_draws(derive(self.key, _number_of(each)))
            yield each
        self.seed()

    def __reduce__(self) -> tuple[Any, ...]:
        # the default would iterate, and seed the random states of the process that sends the list
        return type(self)._made, (self.plain(), self.key)

    @classmethod
    def _made(cls, ids: list[Any], key: int) -> Self:
        made = cls(ids, key)
        made.seed()
        return made

    def seed(self) -> None:
        """Seed the random states for the whole microbatch."""
        first = _number_of(self.plain()[0]) if len(self) else 0
        seed_draws(derive(self.key, first, OF_BATCH))

    def plain(self) -> list[Any]:
        return [*super().__iter__()]


def _number_of(index: Any) -> int:
    try:
        return int(index)
    except (TypeError, ValueError):  # a sampler may give names or tuples
        return zlib.crc32(repr(index).encode())
