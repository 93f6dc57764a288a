"""Mixture of sources: which source each position reads, as a pure function of the position."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.blocks import Ends, MixtureOrder, MixturePlan
from surefoot.components.data.feed import Feed
from surefoot.components.data.loader.streams import SeededIds
from surefoot.components.data.order import check_ids, find_shares
from surefoot.components.data.sources.wrapped import (
    SeededReads,
    TorchDataset,
    as_source,
    read_items,
)
from surefoot.contract.task import Batch, Guarantee, Source
from surefoot.core.errors import DataError


class Concat:
    """Source of the samples of several sources, one after another, with one order over all.

    Their batches must have the same structure, dtypes and shapes, such as the windows of several
    token files. Datasets of torch are joined by `torch.utils.data.ConcatDataset` instead, so that
    a collate function gets the samples of a batch together.

    Args:
        sources: The sources, whose samples are read by number, or what `as_source` takes.

    Raises:
        DataError: For no source, one of another kind, sources of images whose classes differ, and
            sources whose samples differ in fields, dtypes or shapes.
    """

    guarantee: Guarantee = "proven"

    def __init__(self, sources: Iterable[Any]) -> None:
        self._sources = [as_source(each) for each in sources]
        if not self._sources:
            raise DataError("Concat got no source", hint="give one source or more in a list")
        for each in self._sources:
            is_mixture = hasattr(type(each), "order_of")
            if each.guarantee != "proven" or isinstance(each, TorchDataset) or is_mixture:
                raise DataError(
                    f"{each.describe()} cannot be one of several sources",
                    hint="join datasets with torch.utils.data.ConcatDataset; a stream, a "
                    "DataLoader or a mixture cannot be joined",
                )
        self.classes = getattr(self._sources[0], "classes", None)
        for each in self._sources:
            if (others := getattr(each, "classes", None)) != self.classes:
                raise DataError(
                    f"Concat got sources with different classes: {self.classes} and {others}",
                    hint="give each the same classes, in the same order, since labels are numbers",
                )
        names = [f"source {number}" for number in range(1, len(self._sources) + 1)]
        self._gives_fields = check_alike(self._sources, names)
        self._ends = np.cumsum([len(each) for each in self._sources])
        self.thread_safe = all(getattr(each, "thread_safe", False) for each in self._sources)
        digests = " ".join(each.digest for each in self._sources)
        self.digest = hashlib.sha256(digests.encode()).hexdigest()
        tokens = [getattr(each, "tokens_per_sample", None) for each in self._sources]
        if None not in tokens:
            counts = [len(each) for each in self._sources]
            self.tokens_per_sample = np.dot(cast(Any, tokens), counts) / len(self)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, ids: np.ndarray) -> Batch:
        ids = check_ids(ids, len(self))
        owners = np.searchsorted(self._ends, ids, side="right")
        parts: list[tuple[np.ndarray, Batch]] = []
        for owner in np.unique(owners).tolist():
            places = np.flatnonzero(owners == owner)
            before = int(self._ends[owner - 1]) if owner else 0
            parts.append((places, self._sources[owner].read(ids[places] - before)))
        if not parts:
            return self._sources[0].read(ids)
        if len(parts) == 1:
            return parts[0][1]
        return _merge_rows(parts, len(ids), has_fields=self._gives_fields)

    def describe(self) -> str:
        first, count = self._sources[0].describe(), len(self._sources)
        return f"{len(self):,} samples of {count} sources, the first with {first}"


def check_alike(sources: Sequence[Source], names: Sequence[str]) -> bool:
    """Raise DataError unless the first samples of all sources can be one batch.

    A source whose first sample cannot be read is not compared. Returns whether the batches are
    lists of fields, not lists of samples.
    """
    rows = [(name, _read_some(each, 1)) for name, each in zip(names, sources, strict=True)]
    known = [(name, row) for name, row in rows if row is not None]
    fields = _gives_fields(sources[0])
    for name, row in known[1:]:
        first, of_first = known[0]
        try:
            _merge_rows([(np.array([0]), of_first), (np.array([1]), row)], 2, has_fields=fields)
        except DataError as error:
            raise DataError(f"{first} and {name}: {error.message}", hint=error.hint) from None
    return fields


def _read_some(source: Source, count: int) -> Any:
    """Return a batch of the first samples of a source, None if they cannot be read."""
    try:
        return source.read(np.arange(min(count, len(source)), dtype=np.int64))
    except Exception:  # noqa: BLE001 - of a bad sample, which a run may leave out
        return None


def _gives_fields(source: Source) -> bool:
    """Return whether the batches of a source are lists of fields, not lists of samples."""
    batch = _read_some(source, 1)
    if isinstance(batch, list) and len(batch) == 1 and len(source) > 1:
        batch = _read_some(source, 2)
        return isinstance(batch, list) and len(batch) == 1
    return isinstance(batch, list) and len(batch) != 1


def _merge_rows(
    parts: list[tuple[np.ndarray, Any]], size: int, *, has_fields: bool = False
) -> Batch:
    """Return one batch of `size` samples from parts of it, each with the places of its rows.

    With `has_fields`, the items of a list are fields with a row for each sample, else samples.
    Raises DataError if the parts have different structures, dtypes or shapes.
    """
    first, batches = parts[0][1], [batch for _, batch in parts]
    is_alike = len({type(each) for each in batches}) == 1

    def merge_field(key: Any) -> Any:
        return _merge_rows([(places, batch[key]) for places, batch in parts], size)

    if all(isinstance(each, Tensor) for each in batches):
        if len({(each.dtype, each.shape[1:], each.ndim > 0) for each in batches}) == 1:
            return _merge_tensors(parts, size)
    elif is_alike and isinstance(first, Mapping):
        if all(each.keys() == first.keys() for each in batches):
            return {key: merge_field(key) for key in first}
    elif is_alike and (isinstance(first, tuple) or (isinstance(first, list) and has_fields)):
        if len({*map(len, batches)}) == 1:
            fields = [merge_field(number) for number in range(len(first))]
            return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    elif is_alike and isinstance(first, list) and all(len(each) == len(at) for at, each in parts):
        return _merge_samples(parts)
    kinds = ", ".join(dict.fromkeys(map(_describe_rows, batches)))
    raise DataError(
        f"sources that are read together give batches that differ: {kinds}",
        hint="give sources of the same fields, dtypes and shapes",
    )


def _merge_tensors(parts: list[tuple[np.ndarray, Tensor]], size: int) -> Tensor:
    first = parts[0][1]
    made = first.new_empty((size, *first.shape[1:]))
    for places, rows in parts:
        made[torch.from_numpy(places)] = rows
    return made


def _merge_samples(parts: list[tuple[np.ndarray, list[Any]]]) -> list[Any]:
    of_place = {
        place: row
        for places, rows in parts
        for place, row in zip(places.tolist(), rows, strict=True)
    }
    return [of_place[place] for place in sorted(of_place)]


def _describe_rows(rows: Any) -> str:
    if isinstance(rows, Tensor):
        return f"rows of {tuple(rows.shape[1:])} {rows.dtype}"
    if isinstance(rows, Mapping):
        return f"the fields {', '.join(map(str, rows))}"
    count = f" of {len(rows)}" if isinstance(rows, tuple | list) else ""
    return f"a {type(rows).__name__}{count}"


class _Datasets:
    """Datasets one after another; from their total number on, the numbers begin again."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        self._datasets, self._ends = datasets, np.cumsum([len(each) for each in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, number: int) -> tuple[int, int]:
        within = number % len(self)
        owner = int(np.searchsorted(self._ends, within, side="right"))
        return owner, within - int(self._ends[owner - 1] if owner else 0)

    def __getitem__(self, number: int) -> Any:
        owner, within = self._find(number)
        return self._datasets[owner][within]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        if isinstance(numbers, SeededIds):  # iterating seeds the draws of each sample
            return [self[number] for number in numbers]
        places: dict[int, list[tuple[int, int]]] = {}
        for place, number in enumerate(numbers):
            owner, within = self._find(number)
            places.setdefault(owner, []).append((place, within))
        found: list[Any] = [None] * len(numbers)
        for owner, rows in places.items():
            items = read_items(self._datasets[owner], [within for _, within in rows])
            for (place, _), item in zip(rows, items, strict=True):
                found[place] = item
        return found


class Mixture:
    """Source that mixes sources by weight: `Mixture({"web": (web, 0.7), "code": (code, 0.3)})`.

    After any number of samples, each source has within one sample of its exact share, counted from
    the start of the run or from the last change of the weights; with "first", from the start of
    each epoch, and with "once", from the last end of a source. An evaluation reads each sample of
    all sources once.

    Args:
        sources: A source or dataset by name, as `as_source` takes it, alone or in a tuple with its
            weight. Without weights, these are the numbers of samples.
        ends: What happens when a source ends: "repeat" reads it again, in another order; "first"
            ends the epoch; "once" goes on with the others, in the same ratio, so that an epoch
            reads each sample once. With "repeat", an epoch has as many samples as all sources.
        temperature: The weights are raised to the power of 1 / temperature and normalized; above 1
            small sources get more (Raffel et al., "Exploring the Limits of Transfer Learning",
            2020, section 3.5.2).
        draws: True to shuffle which source comes next, within 1,000 samples at a time; a source
            then has within one sample of its exact share after each of these.
        changes: Weights by name that hold from a step on, by its number from 1; only with "repeat".
            A source that begins or ends in the middle of a run has the weight 0 elsewhere.
        collate: Function from a list of samples to a batch, for sources that are all datasets; by
            default the task's `collate`.

    Raises:
        DataError: For weights, names or steps that are not possible, and sources that cannot be
            joined.
    """

    guarantee: Guarantee = "proven"

    def __init__(
        self,
        sources: Mapping[str, Any],
        *,
        ends: Ends = "repeat",
        temperature: float = 1.0,
        draws: bool = False,
        changes: Mapping[int, Mapping[str, float]] | None = None,
        collate: Callable[[list[Any]], Batch] | None = None,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise DataError(
                "Mixture got no sources by name", hint='Mixture({"web": (source, 0.7), ...})'
            )
        given = {name: _split_weight(name, each) for name, each in sources.items()}
        if ends not in get_args(Ends):
            raise DataError(
                f"ends is {ends!r}", hint=f"use one of {', '.join(map(repr, get_args(Ends)))}"
            )
        self.names, self._changes = tuple(given), dict(changes or {})
        self._datasets: Any = None
        if self._changes and ends != "repeat":
            raise DataError(
                f"weights change during the run, and ends is {ends!r}",
                hint='leave ends out, or set it to "repeat"',
            )
        if not isinstance(draws, bool) or not isinstance(temperature, int | float | np.number):
            raise DataError(
                f"draws is {draws!r}, and temperature is {temperature!r}",
                hint="draws is True or False, temperature a number above 0",
            )
        parts = [_as_part(name, each, collate) for name, (each, _) in given.items()]
        self._source = self._join(parts, collate)
        sizes = tuple(map(len, parts))
        known = [weight for _, weight in given.values() if weight is not None]
        if known and len(known) < len(given):
            without = next(name for name, (_, weight) in given.items() if weight is None)
            raise DataError(
                f"some sources have a weight, and {without!r} has none",
                hint="give all of them a weight, or none",
            )
        weights = known or [float(size) for size in sizes]
        self._temperature = temperature
        first = dict(zip(self.names, weights, strict=True))
        used = [first, *self._changes.values()]
        for name in self.names:
            if not any(each.get(name, 1) for each in used if isinstance(each, Mapping)):
                raise DataError(
                    f"the weight of {name!r} is 0",
                    hint="give a finite number above 0, or leave the source out",
                )
        shares = self._find_shares(first)
        self.plan = MixturePlan(sizes, shares, ends, draws)
        if 0 in (counts := self.plan.count(self.plan.length)) and ends == "first":
            raise DataError(
                f"an epoch of {self.plan.length:,} samples ends with another source before it "
                f"reads one of {self.names[counts.index(0)]!r}",
                hint='give it a larger weight, or use ends="repeat"',
            )
        self._later = {step: self._find_later(step, each) for step, each in self._changes.items()}
        digests = [self.plan.as_text(), repr(sorted(self._later.items()))]
        digests += [each.digest for each in parts]
        self.digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()
        self.thread_safe = bool(getattr(self._source, "thread_safe", False))
        contents = [getattr(each, "content_digest", None) for each in parts]
        self.content_digest = None if None in contents else " ".join(map(str, contents))
        tokens = [getattr(each, "tokens_per_sample", None) for each in parts]
        if None not in tokens:
            self.tokens_per_sample = np.dot(cast(Any, tokens), shares) / sum(shares)

    def _join(self, parts: list[Source], collate: Callable[[list[Any]], Batch] | None) -> Source:
        datasets = [each for each in parts if isinstance(each, TorchDataset)]
        if not datasets:
            check_alike(parts, [f"source {name!r}" for name in self.names])
            return Concat(parts)
        if len(datasets) < len(parts):
            raise DataError(
                "some sources of the mixture are datasets, and some are not: "
                + ", ".join(each.describe() for each in parts),
                hint="give datasets only, whose samples collate makes into batches, or none",
            )
        own = datasets[0].own_collate
        if any(each.own_collate is not own for each in datasets):
            raise DataError(
                "the datasets of the mixture have different collate functions",
                hint="give the datasets themselves, and collate to the mixture or the task",
            )
        self._datasets = _Datasets([each.dataset for each in datasets])
        return TorchDataset(self._datasets, collate or own)

    def _find_later(self, step: int, weights: Mapping[str, float]) -> tuple[int, ...]:
        if not isinstance(step, int | np.integer) or step < 2:
            raise DataError(
                f"weights change at step {step!r}", hint="give the number of a step from 2 on"
            )
        if not isinstance(weights, Mapping) or weights.keys() != set(self.names):
            raise DataError(
                f"the weights from step {step:,} on are {weights!r:.80}",
                hint=f"give a weight for each of {', '.join(self.names)}",
            )
        return self._find_shares({name: weights[name] for name in self.names})

    def _find_shares(self, weights: Mapping[str, float]) -> tuple[int, ...]:
        """Return the shares of weights, which are raised to the power of 1 / temperature."""
        if not 0 < self._temperature < math.inf:
            raise DataError(
                f"temperature is {self._temperature}",
                hint="give a number above 0; 1 changes no weight",
            )
        for name, weight in weights.items():
            is_number = isinstance(weight, int | float | np.number) and math.isfinite(weight)
            if not is_number or weight < 0:
                raise DataError(
                    f"the weight of {name!r} is {weight!r}",
                    hint="give a finite number above 0, or leave the source out",
                )
        largest = float(max(weights.values()))
        if not largest:
            raise DataError("all weights are 0", hint="give one source a weight above 0")
        parts = [(float(each) / largest) ** (1 / self._temperature) for each in weights.values()]
        if any(each and not part for each, part in zip(weights.values(), parts, strict=True)):
            raise DataError(
                f"with temperature = {self._temperature}, a source has no share",
                hint="give a temperature nearer to 1",
            )
        return find_shares(parts)

    def with_collate(self, collate: Callable[[list[Any]], Batch]) -> Mixture:
        """Let `collate` make the batches, if all sources are datasets and none was given."""
        if self._datasets is not None and not self.collates:
            self._source = TorchDataset(self._datasets, collate)
        return self

    def __len__(self) -> int:
        return sum(self.plan.sizes)

    def read(self, ids: np.ndarray) -> Batch:
        return self._source.read(self._numbers(ids))

    def _numbers(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers among the samples of all sources, without those of their passes."""
        numbers: np.ndarray = check_ids(ids, 2**63) % len(self)
        return numbers

    def seeded(self, key: int) -> Source:
        """Return the source for one epoch, whose draws depend on `key` and the sample."""
        return cast(Source, SeededReads(self, key))

    def read_seeded(self, ids: np.ndarray, key: int) -> Batch:
        """Read samples with the draws that `seeded` describes."""
        if self._datasets is None:
            return self._source.read(self._numbers(ids))
        numbers = self._numbers(ids).tolist()
        # what is drawn depends on the pass, too
        return self.collate(self.samples_of(ids.tolist(), key), numbers)

    @property
    def collates(self) -> bool:
        """True if a collate function was given."""
        return isinstance(self._source, TorchDataset) and self._source.collates

    def samples_of(self, numbers: list[int], key: int) -> list[Any]:
        """Read samples of datasets as `read_seeded` does."""
        inner: Any = self._source
        items: list[Any] = inner.samples_of(numbers, key)
        return items

    def collate(self, items: list[Any], numbers: list[int]) -> Batch:
        """Return samples of datasets as a batch; `numbers` are theirs."""
        inner: Any = self._source
        batch: Batch = inner.collate(items, numbers)
        return batch

    def number_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of samples among those of all sources, for messages."""
        return ids % len(self)

    def num_positions(self, multiple: int) -> int:
        """Return the samples of an epoch; with "repeat" a multiple of `multiple`, if possible."""
        length = self.plan.length
        return (length // multiple or 1) * multiple if self.plan.ends == "repeat" else length

    def order_of(self, feed: Feed, seed: int, *, shuffle: bool) -> MixtureOrder:
        """Return the order of the samples of `feed`."""
        changes = ((feed.samples_after(step - 1), later) for step, later in self._later.items())
        plan = MixturePlan(
            self.plan.sizes,
            self.plan.shares,
            self.plan.ends,
            self.plan.draws,
            tuple(sorted(changes)),
        )
        return MixtureOrder(feed.order.n, seed, plan, shuffle)

    def count(self, feed: Feed, steps: int) -> dict[str, dict[str, float]]:
        """Return how many samples and epochs of each source the first `steps` steps read."""
        order: Any = feed.order
        epoch, position = feed.find_position(steps)
        counts = order.count(epoch, position, order.n - feed.dropped)
        total = sum(counts) or 1
        return {
            name: {"samples": count, "share": count / total, "epochs": count / size}
            for name, count, size in zip(self.names, counts, self.plan.sizes, strict=True)
        }

    def describe(self) -> str:
        total = sum(self.plan.shares)
        parts = (
            f"{name} {share / total:.4g} of {size:,} samples"
            for name, share, size in zip(self.names, self.plan.shares, self.plan.sizes, strict=True)
        )
        return f"a mixture of {', '.join(parts)}"


def _as_part(name: str, given: Any, collate: Callable[[list[Any]], Batch] | None) -> Source:
    """Return a source of a mixture. Raises DataError, with its name, for one that cannot be."""
    try:
        part = as_source(given, collate)
    except DataError as error:
        raise DataError(f"source {name!r}: {error.message}", hint=error.hint) from error
    if part.guarantee != "proven" or hasattr(type(part), "order_of"):
        raise DataError(
            f"source {name!r} cannot be part of a mixture: {part.describe()}",
            hint="give sources or datasets whose samples are read by number",
        )
    return part


def _split_weight(name: str, given: Any) -> tuple[Any, float | None]:
    """Return a source and its weight, None without one. Raises DataError for another value."""
    if not (isinstance(given, tuple) and len(given) == 2):
        return given, None
    source, weight = given
    numbers = (int, float, np.number)
    if isinstance(weight, numbers) and not isinstance(weight, bool):
        if not isinstance(source, numbers):
            return source, float(weight)
    elif not isinstance(source, numbers):
        is_scalar = isinstance(weight, str | bool | NoneType) or getattr(weight, "ndim", 1) == 0
        if not is_scalar:
            return given, None
    raise DataError(
        f"the weight of {name!r} is {weight!r:.40}",
        hint="give a source and its weight, a number, in this order: (source, 0.7)",
    )
