"""Observation of a user's DataLoader: the samples of each batch, and its random generators."""

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

    Iterate over `data` for the batches, and call `take` for the sample indices of each batch. The
    indices are known for a plain DataLoader of a map-style dataset. They are not known for a loader
    of a different class, one that already has persistent workers, or one that returns batches out
    of order.
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
        """True if the order of an epoch may depend on random numbers drawn after its start.

        It is False for the samplers of torch, which draw their order, or the seed of their own
        generator, at the start of the epoch.
        """
        return not (self.knows_samples and self._order_is_torchs)

    @property
    def has_lasting_workers(self) -> bool:
        return bool(getattr(self.data, "persistent_workers", False))

    def begin_pass(self) -> None:
        self._drawn.clear()

    def take(self) -> tuple[Any, ...]:
        """Return the sample indices of the next batch; () if they are unknown.

        Call it once per batch, in the order of the batches.
        """
        if not self._drawn:
            return ()
        drawn = self._drawn.popleft()
        return tuple(drawn) if isinstance(drawn, Iterable) else (drawn,)

    def record(self, batch: Any, seen: PassDigest) -> tuple[int, ...]:
        """Add the next batch to the digests `seen`, and return its sample indices for the ledger.

        If the indices are unknown, a digest of the batch is returned, as four 32-bit numbers.
        """
        samples = self.take() if self.knows_samples else None
        self.num_drawn = len(samples or ()) or None
        # workers started after a restart draw a different augmentation: do not hash contents
        digest = seen.add(batch, samples, spots=not self.has_lasting_workers)
        return struct.unpack("<4I", digest) if samples is None else as_ids(samples)

    def iterate(self) -> Iterator[Any]:
        """Return an iterator over the batches.

        If this process is forked, the child process does not end the workers of the iterator.
        """
        iterator = iter(self.data)
        never_end_in_children(iterator)
        return iterator

    def close(self) -> None:
        """End the persistent workers of an observed loader.

        If the samples of the loader are unknown, `data` is the user's own object, and its workers
        are not ended.
        """
        if self._sampler is not None:
            vars(self.data)["_iterator"] = None

    # ---- generators that determine the order and the values

    def generators(self) -> dict[str, Any]:
        """Return the random generators that the data draw from, by name, each once.

        The generators of the loader and of its samplers come first; they determine the order.
        Nested samplers, such as those of Accelerate, are included. The other generators, of torch,
        NumPy or Python, are found in attributes of the dataset and of the objects to which it
        refers.
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
        """Set the generators of the data to the states that `generator_states` returned.

        Raises ValueError or TypeError for the state of a different type of generator.
        """
        for name, generator in self.generators().items():
            if name in states:
                restore_generator(generator, states[name])

    def sampler_start(self) -> list[Tensor] | None:
        """Return the generator states with which the sampler started this epoch.

        Returns None unless the workers are persistent, because the states then follow from those at
        the start of the epoch. Persistent workers draw their seed only once. After a restart of the
        run, however, new workers draw one in the middle of the run.
        """
        return (
            self._sampler.started
            if self._sampler is not None and self.has_lasting_workers
            else None
        )

    def start_sampler_at(self, states: Sequence[Tensor] | None) -> None:
        """Make the sampler start its next epoch with the generator states `states`.

        Numbers that are drawn before then do not change the order.
        """
        if self._sampler is not None:
            self._sampler.start_at = states

    def before_iteration(self, *, is_first: bool) -> None:
        """Prepare for `iter(data)`.

        Persistent workers draw their seed before the first epoch. After a restart of the run, they
        draw it later; this draw must not change the order of the samples.
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
        """Call `set_epoch` of the loader, or if it has none, of its samplers and its dataset.

        PyTorch expects the training loop to make this call.
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
    """Return generator states by the name of their generator.

    A checkpoint of version 0.1 has a list of states instead, only of the generators of the loader
    and its samplers.
    """
    return (
        dict(held)
        if isinstance(held, Mapping)
        else {f"{OF_LOADER} {number}": each for number, each in enumerate(held)}
    )


def as_ids(samples: Iterable[Any]) -> tuple[int, ...]:
    """Return sample indices as the ledger stores them; () if one is not an integer from 0."""
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
    """Return what the samplers of torch in a DataLoader guarantee about an epoch."""
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
    """Wrapper of a batch sampler that records each batch, and delegates everything else."""

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
