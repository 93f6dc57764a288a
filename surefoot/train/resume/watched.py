"""The data of a loop of the user's own, and which samples each of their batches holds, where that can be seen."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from surefoot.contract.loop_ledger import MOST_IDS, Promise


class Watched:
    """`data` gives what the loop's own data give; of a plain DataLoader with a sampler `take` knows the samples of each batch.

    A loader of another kind, one whose workers stay, and one that gives batches as they get ready are not looked into.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.data, self.promise = data, Promise()
        self._drawn: deque[Any] = deque()
        if _can_be_watched(data):
            self.data = copy.copy(data)  # the user's own loader stays as it is
            vars(self.data)["batch_sampler"] = _Told(data.batch_sampler, self._drawn)  # type: ignore[attr-defined]
            self.promise = _promise_of(data)

    def begin_pass(self) -> None:
        self._drawn.clear()

    def take(self) -> tuple[int, ...]:
        """The samples of the next batch, in the order in which batches come; nothing where they cannot be known."""
        ids = self._drawn.popleft() if self._drawn else ()
        try:
            return tuple(ids) if all(0 <= each < MOST_IDS for each in ids) else ()
        except TypeError:  # a sampler of keys that are no numbers
            return ()


def _can_be_watched(data: Any) -> bool:
    return (
        type(data) is DataLoader
        and data.batch_sampler is not None
        and not isinstance(data.dataset, IterableDataset)
        and not data.persistent_workers
        and getattr(data, "in_order", True)
    )


def _promise_of(data: Any) -> Promise:
    """What a pass holds, where torch's own samplers say so."""
    batches = data.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)  # of a loader that was given a batch sampler its own `sampler` says nothing
    try:
        samples = len(data.dataset)
    except TypeError:
        return Promise()
    is_plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    once = type(batches) is BatchSampler and is_plain and len(sampler) == samples
    return Promise(samples=samples, once=once, all=once and not batches.drop_last)


class _Told:
    """A batch sampler that tells what it drew; in all else the one that it stands for."""

    def __init__(self, inner: Any, drawn: deque[Any]) -> None:
        self._inner, self._drawn = inner, drawn

    def __iter__(self) -> Iterator[Any]:
        for ids in self._inner:
            self._drawn.append(ids)
            yield ids

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
