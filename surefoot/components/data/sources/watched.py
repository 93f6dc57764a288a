"""Observation of a user's DataLoader: the samples of each batch, and its random generators."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
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

from surefoot.components.data.sources.batch_digest import PassDigest, ReadingDifference
from surefoot.components.data.sources.loader_parts import (
    MAX_NESTED,
    find_parts,
    read_state,
    walk_parts,
)
from surefoot.contract.loop_ledger import MAX_IDS, LoopGuarantee
from surefoot.core.process.forked import never_end_in_children
from surefoot.runtime.attributes.generators import (
    find_generators,
    generator_state,
    restore_generator,
)

TORCH_SAMPLERS = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
OF_LOADER = "loader"  # name of the generators of a loader and its samplers
LASTING_HINT = (
    "the DataLoader has persistent_workers: after a restart, new workers draw other random numbers "
    "than those of the previous attempt would have drawn; for the same values, set "
    "persistent_workers=False"
)
DIVIDE_HINT = (
    "divide the samples among workers with torch.utils.data.get_worker_info(), or set "
    "num_workers = 1"
)


class ObservedLoader:
    """Wrapper of the user's loader that records which samples are in each batch.

    Iterate over `data` for the batches, and call `take` for the sample indices of each batch. The
    indices are known for a DataLoader of a map-style dataset, also of a subclass that only has a
    constructor. They are not known for a loader of a different class, one that already has
    persistent workers, or one that returns batches out of order.

    Persistent workers draw their seed once, in the epoch that starts them. `starts_workers` is True
    if the current epoch is that epoch. `worker_seed` is the state of the generator from which the
    seed was drawn. Both are saved, because a restarted run starts its workers in another epoch.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.data, self.promise = data, LoopGuarantee(digests=True)
        self.given = data
        self._drawn: deque[Any] = deque()
        self.num_drawn: int | None = None  # samples of the batch recorded last, if known
        # workers that read the same stream, and digests of the first two batches of each
        self._num_readers = _count_readers(data)
        self._heads: list[bytes] = []
        # an iterator that the stream keeps, and the batch that it returned beyond the length
        self._left: tuple[Iterator[Any], Any] | None = None
        self.starts_workers = False
        self.worker_seed: Tensor | None = None
        self._sampler: _Recorder | None = None
        self.own: dict[str, Any] = {}  # settings of `data` that replace those of the user
        batch_sampler = getattr(data, "batch_sampler", None)
        self._order_is_torchs = (
            type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in TORCH_SAMPLERS
        )
        # samplers and datasets with a state of their own, by name
        self.parts = find_parts(data)
        if _can_be_watched(data):
            self._sampler = _Recorder(data.batch_sampler, self._drawn)  # type: ignore[attr-defined]
            self.data = copy.copy(data)  # the user's loader stays unchanged
            self.own["batch_sampler"] = self._sampler
            self.take_settings()
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

    def explain(self, found: ReadingDifference | None) -> ReadingDifference | None:
        """Return `found`, with a hint on persistent workers if they may have changed the values."""
        if found is None or not found.same_samples or not self.has_lasting_workers:
            return found
        return found._replace(hint=LASTING_HINT)

    def begin_pass(self) -> None:
        self._drawn.clear()
        self._heads.clear()

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
        digest = seen.add(batch, samples)
        if len(self._heads) < 2 * self._num_readers:
            self._heads.append(digest)
        return struct.unpack("<4I", digest) if samples is None else as_ids(samples)

    def iterate(self, *, starts_workers: bool | None = None) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch.

        For an epoch that is read again, `starts_workers` is what the attribute was in its first
        reading. Its order is then the same, whether or not the workers exist already. If this
        process is forked, the child process does not end the workers of the iterator.
        """
        self.take_settings()
        loader = self._find_lasting_loader()
        if loader is None:
            return self._iterate()
        are_new = loader._iterator is None
        self.starts_workers = (
            are_new and self.worker_seed is None if starts_workers is None else starts_workers
        )
        if self.starts_workers and self.worker_seed is None:
            self.worker_seed = (loader.generator or torch.default_generator).get_state()
        if self.starts_workers and not are_new:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as DataLoader
        if are_new and not self.starts_workers:
            return self._iterate_with_new_workers(loader)
        return self._iterate()

    def take_settings(self) -> None:
        """Take over what the user has set in the loader, except for what `own` replaces."""
        if self._sampler is not None:
            given = {name: each for name, each in vars(self.given).items() if name != "_iterator"}
            vars(self.data).update({**given, **self.own})

    def _iterate(self) -> Iterator[Any]:
        iterator, (kept, *surplus) = iter(self.data), self._left or (None,)
        self._left = None
        never_end_in_children(iterator)
        return itertools.chain(surplus, iterator) if iterator is kept else iterator

    def _find_lasting_loader(self) -> DataLoader[Any] | None:
        """Return the DataLoader that keeps its workers, which Accelerate wraps; None without.

        A loader with `load_state_dict` restores the seed of its workers itself.
        """
        loader: Any = getattr(self.data, "base_dataloader", self.data)
        keeps = isinstance(loader, DataLoader) and loader.persistent_workers
        return loader if keeps and not hasattr(loader, "load_state_dict") else None

    def _iterate_with_new_workers(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Return an iterator whose workers take their seed from `worker_seed`.

        The generator from which the order is drawn stays where it is, as with existing workers.
        """
        apart = torch.Generator()
        if self.worker_seed is not None:
            apart.set_state(self.worker_seed)
        with _lend(loader, apart):
            iterator = self._iterate()
        if loader._iterator is None:  # `__iter__` of a subclass is a generator function
            return _start_late(iterator, loader, apart)
        return iterator

    def close(self) -> None:
        """End the persistent workers of an observed loader.

        If the samples of the loader are unknown, `data` is the user's own object, and its workers
        are not ended.
        """
        if self._sampler is not None:
            vars(self.data)["_iterator"] = None

    # ---- number of batches

    def find_repeats(self, number: int, length: int) -> tuple[str, str] | None:
        """Return a notice if each worker reads all of a stream; None before it can be known.

        It is known after `number` batches if these are two batches of each worker, or all of the
        `length` batches of an epoch.
        """
        if number != min(2 * self._num_readers, length) or not self._reads_all():
            return None
        what = (
            f"the first {self._num_readers} batches of the {type(self.data).__name__} are "
            f"identical: each of its workers seems to read all of {self._name_stream()}, so that "
            "its samples are read more than once"
        )
        return what, DIVIDE_HINT

    def _reads_all(self) -> bool:
        """Return whether the workers, which return batches in turn, all return the same ones."""
        turns = [
            self._heads[at : at + self._num_readers]
            for at in range(0, len(self._heads), self._num_readers or 1)
        ]
        are_equal = all(len(set(turn)) == 1 for turn in turns)
        return 1 < self._num_readers <= len(self._heads) and (
            are_equal and len(set(self._heads)) == len(turns)
        )

    def _name_stream(self) -> str:
        return type(self.data.dataset).__name__  # type: ignore[attr-defined]

    def run_to_end(self, iterator: Iterator[Any], length: int) -> tuple[str, str] | None:
        """Run an iterator to its end; return a notice if it has more than `length` batches.

        If a stream of this process keeps its position, the surplus batch is put back.
        """
        restore = self._keep_position(iterator)
        surplus: list[Any] = []
        # an error after the last batch does not concern the epoch
        with contextlib.suppress(Exception):
            # workers that divide the samples return fewer surplus batches than there are workers
            surplus.extend(itertools.islice(iterator, max(1, self._num_readers)))
        if not surplus:
            return None
        restore(surplus[0])
        what = (
            f"the {type(self.data).__name__} returns more batches than its length, {length:,}, and "
            "each epoch ends there"
        )
        if not self._num_readers:
            return what, "give the right length, or Iterated(iterable, num_batches=...)"
        if self._reads_all():
            what += (
                f": each of its {self._num_readers} workers reads all of {self._name_stream()}, so "
                "that some samples are read twice and others never"
            )
            return what, DIVIDE_HINT
        if len(surplus) < self._num_readers:
            total = length + len(surplus)
            what += f": its workers return {total:,} batches, of which several can be short"
            return what, f"to train on all of them, give Iterated(loader, num_batches={total})"
        return what, f"{DIVIDE_HINT}; if they are divided, give Iterated(loader, num_batches=...)"

    def _keep_position(self, iterator: Iterator[Any]) -> Callable[[Any], None]:
        """Return a function that puts the next batch back, if the stream keeps its position."""
        data: Any = self.data
        stream = data
        if isinstance(data, DataLoader):
            stream = data.dataset
            reads_here = isinstance(stream, IterableDataset) and not data.num_workers
            if not reads_here or hasattr(data, "state_dict"):
                return lambda batch: None
        attributes = dict(getattr(stream, "__dict__", {}))
        if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
            # a state that cannot be read or copied is not saved either
            with contextlib.suppress(Exception):
                state = copy.deepcopy(data.state_dict())
                return lambda batch: data.load_state_dict(state)
        if any(each is iterator for each in attributes.values()):
            return lambda batch: setattr(self, "_left", (iterator, batch))
        generators = self.generator_states()

        def restore(batch: Any) -> None:
            if attributes:
                vars(stream).update(attributes)
            self.restore_generators(generators)

        return restore

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

    def pass_states(self) -> dict[str, Any]:
        """Return the states of the generators, and of `parts`, from which an epoch starts.

        The state of a part is left out if `read_state` returns none.
        """
        return self.generator_states() | self.part_states()

    def part_states(self) -> dict[str, Any]:
        """Return the states of `parts`, without those for which `read_state` returns none."""
        states = {name: read_state(part) for name, part in self.parts.items()}
        return {name: state for name, state in states.items() if state is not None}

    def restore_parts(self, states: Mapping[str, Any]) -> None:
        """Load the states that `pass_states` returned into the samplers and datasets."""
        for name, part in self.parts.items():
            if name in states:
                part.load_state_dict(copy.deepcopy(states[name]))

    def restore_generators(self, states: Mapping[str, Any]) -> None:
        """Restore the return value of `generator_states` or `pass_states`.

        Raises ValueError or TypeError for the state of a different type of generator.
        """
        self.restore_parts(states)
        for name, generator in self.generators().items():
            if name in states:
                restore_generator(generator, states[name])

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the loader, or if it has none, of its samplers and its datasets.

        PyTorch expects the training loop to make this call. Of two that are nested, such as a
        dataset in a `Subset`, the inner one is called first, so that the outer one decides.
        """
        places = [self.data]
        if not callable(getattr(self.data, "set_epoch", None)):
            places = [each for _, each in reversed(walk_parts(self.given))]
        for place in places:
            if callable(getattr(place, "set_epoch", None)):
                place.set_epoch(epoch)  # type: ignore[attr-defined]


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
        _only_constructs(type(data))
        and data.batch_sampler is not None
        and not isinstance(data.dataset, IterableDataset)
        and data._iterator is None  # otherwise its workers would be started twice
        and getattr(data, "in_order", True)
    )


def _count_readers(data: Any) -> int:
    """Return the number of workers that read the same stream; 0 for other data and one reader."""
    is_stream = isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset)
    return data.num_workers if is_stream and data.num_workers > 1 else 0


def _only_constructs(kind: type) -> bool:
    """Return whether this is DataLoader, or a subclass that only has a constructor, as PyG's."""
    return DataLoader in kind.__mro__ and not any(
        isinstance(each, FunctionType | property) and name != "__init__"
        for base in kind.__mro__[: kind.__mro__.index(DataLoader)]
        for name, each in vars(base).items()
    )


@contextlib.contextmanager
def _lend(loader: DataLoader[Any], generator: torch.Generator) -> Iterator[None]:
    """Let a loader draw from `generator` in the block; its samplers keep their own."""
    own, loader.generator = loader.generator, generator
    try:
        yield
    finally:
        loader.generator = own


def _start_late(
    iterator: Iterator[Any], loader: DataLoader[Any], generator: torch.Generator
) -> Iterator[Any]:
    with _lend(loader, generator):
        first = list(itertools.islice(iterator, 1))
    yield from first
    yield from iterator


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

    def __iter__(self) -> Iterator[Any]:
        for given in self._inner:
            ids = list(given) if isinstance(given, Iterator) else given  # it can be read only once
            self._drawn.append(ids)
            yield ids

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
