"""Observation of a user's loader: the samples of each batch, and the generators of its order."""

from __future__ import annotations

import copy
import operator
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from surefoot.components.data.sources.batch_digest import PassDigest
from surefoot.contract.loop_ledger import MAX_IDS, LoopGuarantee
from surefoot.core.process.forked import never_end_in_children
from surefoot.runtime.attributes.generators import (
    find_generators,
    generator_state,
    restore_generator,
)

MAX_NESTED = 16  # nesting of samplers
TORCH_SAMPLERS = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
OF_LOADER = "loader"  # name of the generators of a loader and its samplers


class ObservedLoader:
    """Wrapper of the user's loader that records which samples are in each batch.

    Iterate over `data` for the batches; `take` returns the samples of the next batch. Samples are
    known for a plain DataLoader with a sampler. They are not known for a loader of a different
    class, one that already has persistent workers, or one that returns batches out of order.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.data, self.promise = data, LoopGuarantee(digests=True)
        self._drawn: deque[Any] = deque()
        self.num_drawn: int | None = None  # samples of the batch recorded last, if known
        self._sampler: _Recorder | None = None
        batch_sampler = getattr(data, "batch_sampler", None)
        self._order_is_torchs = (
            type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in TORCH_SAMPLERS
        )
        if _can_be_watched(data):
            self._sampler = _Recorder(data.batch_sampler, self._drawn)  # type: ignore[attr-defined]
            self.data = copy.copy(data)  # the user's loader stays unchanged
            vars(self.data)["batch_sampler"] = self._sampler
            self.promise = _find_sampler_guarantee(data)

    @property
    def knows_samples(self) -> bool:
        """True if the indices of the samples in each batch are known."""
        return self._sampler is not None

    @property
    def draws_late(self) -> bool:
        """True unless the order of an epoch follows from the random states at its start.

        The samplers of torch draw their order, or the seed of their own generator, at the start.
        """
        return not (self.knows_samples and self._order_is_torchs)

    @property
    def has_lasting_workers(self) -> bool:
        return bool(getattr(self.data, "persistent_workers", False))

    def begin_pass(self) -> None:
        self._drawn.clear()

    def take(self) -> tuple[Any, ...]:
        """Return the samples of the next batch, in the order of the batches; () if unknown."""
        if not self._drawn:
            return ()
        drawn = self._drawn.popleft()
        return tuple(drawn) if isinstance(drawn, Iterable) else (drawn,)

    def record(self, batch: Any, seen: PassDigest) -> tuple[int, ...]:
        """Add the next batch to `seen`; return its samples as the ledger holds them.

        If the samples are unknown, a digest of the batch is returned.
        """
        samples = self.take() if self.knows_samples else None
        self.num_drawn = len(samples or ()) or None
        # workers started after a restart draw another augmentation, which is known: no spots
        digest = seen.add(batch, samples, spots=not self.has_lasting_workers)
        return struct.unpack("<4I", digest) if samples is None else as_ids(samples)

    def iterate(self) -> Iterator[Any]:
        """Return an iterator of this process and its workers, which forked processes never end."""
        iterator = iter(self.data)
        never_end_in_children(iterator)
        return iterator

    def close(self) -> None:
        """End the persistent workers of an observed loader.

        The workers of a loader that is the user's object stay with it.
        """
        if self._sampler is not None:
            vars(self.data)["_iterator"] = None

    # ---- generators that determine the order and the values

    def generators(self) -> dict[str, Any]:
        """Return the generators that the data draw from, by name, each once.

        Those of the loader and of its samplers, which determine the order, come first; nested
        samplers, as Accelerate makes them, are included. The others are in attributes of the
        dataset and of what it refers to, and are of torch, NumPy or Python.
        """
        of_loader = self._loader_generators()
        known = {id(each) for each in of_loader}
        others = {
            name: each
            for name, each in find_generators([("data", self.data)]).items()
            if id(each) not in known
        }
        return {**name_states(of_loader), **others}

    def _loader_generators(self) -> list[torch.Generator]:
        places = [self.data]
        for place in places:
            inner = (getattr(place, name, None) for name in ("sampler", "batch_sampler"))
            places += [
                each
                for each in inner
                if each is not None
                and len(places) < MAX_NESTED
                and all(each is not one for one in places)
            ]
        found = [
            getattr(place, name, None)
            for place in places
            for name in ("generator", "synchronized_generator")
        ]
        return list(
            {id(each): each for each in found if isinstance(each, torch.Generator)}.values()
        )

    def generator_states(self) -> dict[str, Any]:
        return {name: generator_state(each) for name, each in self.generators().items()}

    def restore_generators(self, states: Mapping[str, Any]) -> None:
        """Set the generators of the data to what `generator_states` returned.

        Raises ValueError or TypeError for the state of a different kind of generator.
        """
        for name, generator in self.generators().items():
            if name in states:
                restore_generator(generator, states[name])

    def sampler_start(self) -> list[Tensor] | None:
        """Return the states of the generators at which the sampler started this epoch.

        Returns None if they follow from the states at the start of the epoch. Persistent workers
        draw their seed once; the workers that replace them after a restart draw one in the middle
        of the run.
        """
        return (
            self._sampler.started
            if self._sampler is not None and self.has_lasting_workers
            else None
        )

    def start_sampler_at(self, states: Sequence[Tensor] | None) -> None:
        """Make the sampler start its next epoch at `states`, whatever is drawn before."""
        if self._sampler is not None:
            self._sampler.start_at = states

    def before_iteration(self, *, is_first: bool) -> None:
        """Prepare for `iter(data)`.

        Persistent workers draw their seed before the first epoch; a seed drawn later must not
        change the order.
        """
        sampler = self._sampler
        if (
            sampler is not None
            and self.has_lasting_workers
            and not is_first
            and self.data._iterator is None  # type: ignore[attr-defined]
        ):
            sampler.start_at = sampler.start_at or [
                generator.get_state() for generator in sampler.generators()
            ]

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the loader, else of its samplers and its dataset.

        The owner of a training loop is expected to do this.
        """
        batches = getattr(self.data, "batch_sampler", None)
        inner = (
            getattr(self.data, "sampler", None),
            batches,
            getattr(batches, "sampler", None),
            getattr(self.data, "dataset", None),
        )
        places = (self.data,) if callable(getattr(self.data, "set_epoch", None)) else inner
        for place in {id(each): each for each in places}.values():
            if callable(getattr(place, "set_epoch", None)):
                place.set_epoch(epoch)  # type: ignore[union-attr]


def name_states(held: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Return states by the name of their generator.

    Version 0.1 wrote a list, of the generators of the loader and its samplers alone.
    """
    return (
        dict(held)
        if isinstance(held, Mapping)
        else {f"{OF_LOADER} {number}": each for number, each in enumerate(held)}
    )


def as_ids(samples: Iterable[Any]) -> tuple[int, ...]:
    """Return the samples as the ledger holds them; () for keys that are not integers from 0."""
    try:
        ids = tuple(map(operator.index, samples))
    except (TypeError, ValueError, RuntimeError):
        return ()
    return ids if not ids or (min(ids) >= 0 and max(ids) < MAX_IDS) else ()


def _can_be_watched(data: Any) -> bool:
    return (
        type(data) is DataLoader
        and data.batch_sampler is not None
        and not isinstance(data.dataset, IterableDataset)
        and data._iterator is None  # otherwise its workers would be started twice
        and getattr(data, "in_order", True)
    )


def _find_sampler_guarantee(data: Any) -> LoopGuarantee:
    """Return the facts about an epoch that the samplers of torch determine."""
    batches = data.batch_sampler
    # the `sampler` of a loader that was given a batch sampler has no meaning
    sampler: Any = getattr(batches, "sampler", None)
    try:
        samples = len(data.dataset)
    except TypeError:
        return LoopGuarantee()
    is_plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement
    )
    once = type(batches) is BatchSampler and is_plain and len(sampler) == samples
    return LoopGuarantee(samples=samples, once=once, all=once and not batches.drop_last)


class _Recorder:
    """Batch sampler that records its batches, and delegates all else to the wrapped sampler."""

    def __init__(self, inner: Any, drawn: deque[Any]) -> None:
        self._inner, self._drawn = inner, drawn
        self.started: list[Tensor] | None = None
        self.start_at: Sequence[Tensor] | None = None

    def __iter__(self) -> Iterator[Any]:
        generators = self.generators()
        if self.start_at is not None:
            for generator, state in zip(generators, self.start_at, strict=False):
                generator.set_state(state)
            self.start_at = None
        self.started = [generator.get_state() for generator in generators]
        for given in self._inner:
            ids = list(given) if isinstance(given, Iterator) else given  # it can be read only once
            self._drawn.append(ids)
            yield ids

    def generators(self) -> list[torch.Generator]:
        own = (
            getattr(self._inner, "generator", None),
            getattr(getattr(self._inner, "sampler", None), "generator", None),
        )
        unique = {
            id(each): each
            for each in (torch.default_generator, *own)
            if isinstance(each, torch.Generator)
        }
        return list(unique.values())

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
