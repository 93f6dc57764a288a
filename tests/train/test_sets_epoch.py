"""Before each epoch, set_epoch of the samplers and datasets is called, as PyTorch loops do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
)

from surefoot.components.data.sources.watched import ObservedLoader
from tests.train.test_loader_resume import BATCH, NUMBERS, SAMPLES, UNSAVED, Task, resumed, train

EPOCHS = 3


class ByNumber:
    """Has another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(SAMPLES, generator=generator).tolist()

    def __len__(self) -> int:
        return SAMPLES


class SetByNumber(ByNumber, Dataset[Any]):
    def __getitem__(self, number: int) -> float:
        return float(self.order()[number])


class StreamByNumber(ByNumber, IterableDataset[Any]):
    def __iter__(self) -> Iterator[float]:
        return map(float, self.order())


class SamplerByNumber(ByNumber, Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(self.order())


class Hiding(Dataset[Any]):
    """Only its loader knows the dataset inside."""

    def __init__(self) -> None:
        self.inner = SetByNumber()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> float:
        return self.inner[number]


class SettingLoader(DataLoader[Any]):
    def set_epoch(self, epoch: int) -> None:
        self.dataset.inner.set_epoch(epoch)  # type: ignore[attr-defined]


class Lazy(Dataset[Any]):
    """Opens a file when its dataset is read, which only a worker may do."""

    def __init__(self) -> None:
        self.num_opened = 0

    @property
    def dataset(self) -> Any:
        self.num_opened += 1
        return SetByNumber()

    def __len__(self) -> int:
        return SAMPLES


class SamplerAround(Sampler[int]):
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


class Doubling(SamplerAround):
    """Uses each epoch of its sampler twice."""

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch // 2)


def distributed() -> DistributedSampler[Any]:
    return DistributedSampler(NUMBERS, num_replicas=1, rank=0)


def of_parts(parts: int) -> DataLoader[Any]:
    each = [Subset(SetByNumber(), [number]) for number in range(parts)]
    return DataLoader(ConcatDataset(each), BATCH)


# a loader, and the object inside whose `set_epoch` a plain loop calls
NESTED: dict[str, Callable[[], DataLoader[Any]]] = {
    "a dataset": lambda: DataLoader(SetByNumber(), BATCH),
    "a stream": lambda: DataLoader(StreamByNumber(), BATCH),
    "a stream in a chain": lambda: DataLoader(ChainDataset([StreamByNumber()]), BATCH),
    "a sampler": lambda: DataLoader(NUMBERS, BATCH, sampler=SamplerByNumber()),
    "a distributed sampler in a batch sampler": lambda: DataLoader(
        NUMBERS, batch_sampler=BatchSampler(distributed(), BATCH, False)
    ),
    "a distributed sampler in a sampler": lambda: DataLoader(
        NUMBERS, BATCH, sampler=SamplerAround(distributed())
    ),
    "a sampler in a sampler of a batch sampler": lambda: DataLoader(
        NUMBERS,
        batch_sampler=BatchSampler(SamplerAround(SamplerAround(SamplerByNumber())), BATCH, False),
    ),
    "a dataset in a concatenation": lambda: DataLoader(ConcatDataset([SetByNumber()]), BATCH),
    "a dataset in a subset": lambda: DataLoader(Subset(SetByNumber(), range(SAMPLES)), BATCH),
    "a dataset in a stack": lambda: DataLoader(StackDataset(value=SetByNumber()), BATCH),
    "18 datasets in subsets": lambda: of_parts(SAMPLES),
    "a loader": lambda: SettingLoader(Hiding(), BATCH),
}


def values_of(loader: Any) -> list[list[float]]:
    found = []
    for given in loader:
        batch = given["value"] if isinstance(given, dict) else given
        batch = batch[0] if isinstance(batch, list) else batch
        found.append(batch.flatten().tolist())
    return found


def set_everywhere(place: Any, epoch: int) -> None:
    """Call `set_epoch` of the objects that have it, as a plain loop does."""
    if hasattr(place, "set_epoch"):
        place.set_epoch(epoch)
        return
    for key, each in getattr(place, "__dict__", {}).items():
        if key in ("sampler", "batch_sampler", "dataset"):
            set_everywhere(each, epoch)
        elif key == "datasets":
            for inner in each.values() if isinstance(each, dict) else each:
                set_everywhere(inner, epoch)


def plain_epochs(loader: Any) -> list[list[list[float]]]:
    found = []
    for epoch in range(EPOCHS):
        set_everywhere(loader, epoch)
        found.append(values_of(loader))
    return found


@pytest.mark.parametrize("kind", NESTED)
def test_set_epoch_reaches_nested_samplers_and_datasets(kind: str) -> None:
    watched, found = ObservedLoader(NESTED[kind]()), []
    for epoch in range(EPOCHS):
        watched.set_epoch(epoch)
        found.append(values_of(watched.data))
    assert found == plain_epochs(NESTED[kind]())
    assert len({str(epoch) for epoch in found}) == EPOCHS


@pytest.mark.quick("a dataset in a concatenation", "a distributed sampler in a sampler")
@pytest.mark.parametrize("kind", [kind for kind in NESTED if kind != "a dataset in a stack"])
def test_a_run_sets_each_epoch_and_a_resumed_run_has_the_same_batches(
    kind: str, tmp_path: Path
) -> None:
    make = NESTED[kind]
    per_epoch = len(make())
    steps = EPOCHS * per_epoch
    unbroken = train(tmp_path / "whole", Task(make()), steps, every=UNSAVED)
    assert unbroken == [batch for epoch in plain_epochs(make()) for batch in epoch]
    assert resumed(tmp_path / "run", make, steps, 2, per_epoch + 1) == unbroken


def test_the_outer_of_two_nested_samplers_decides() -> None:
    loader = DataLoader(NUMBERS, BATCH, sampler=Doubling(distributed()))
    watched = ObservedLoader(loader)
    found = []
    for epoch in range(4):
        watched.set_epoch(epoch)
        found.append(loader.sampler.sampler.epoch)  # type: ignore[attr-defined]
    assert found == [0, 0, 1, 1]


def test_a_property_of_a_dataset_is_not_read() -> None:
    dataset = Lazy()
    ObservedLoader(DataLoader(dataset, BATCH)).set_epoch(1)
    assert dataset.num_opened == 0
