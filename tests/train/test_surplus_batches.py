"""Streams that give more batches than their length says, or each sample several times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ChainDataset,
    DataLoader,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.data.sources.wrapped import TorchDataset
from surefoot.core.errors import DataError
from surefoot.train.attach.arguments import find_guarantee


class Unsized(IterableDataset[Any]):
    """Gives all of its samples to every worker, or those of its part."""

    def __init__(self, samples: int, *, divides: bool = False, is_constant: bool = False) -> None:
        self.samples, self.divides, self.is_constant = samples, divides, is_constant

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info and self.divides else (0, 1)
        for number in range(first, self.samples, step):
            yield 0.0 if self.is_constant else float(number)


class Sized(Unsized):
    def __len__(self) -> int:
        return self.samples


def read(source: Iterated, steps: int) -> list[float]:
    return [
        value
        for step in range(steps)
        for value in np.ravel(source.read(np.array([step % len(source)]))).tolist()
    ]


CUT: dict[str, tuple[Callable[[], Any], int, bool]] = {
    "two workers read all": (lambda: DataLoader(Unsized(12), 4, num_workers=2), 6, True),
    "three workers read all": (lambda: DataLoader(Unsized(8), 4, num_workers=3), 5, True),
    "only one batch of each": (lambda: DataLoader(Unsized(4), 4, num_workers=2), 2, True),
    "sample by sample": (lambda: DataLoader(Unsized(3), None, num_workers=2), 6, True),
    "sized, and read twice": (lambda: DataLoader(Sized(8), 4, num_workers=2), 4, True),
    "they divide": (lambda: DataLoader(Unsized(16, divides=True), 4, num_workers=2), 4, False),
    "all samples are equal": (
        lambda: DataLoader(Unsized(8, is_constant=True), 4, num_workers=2),
        4,
        False,
    ),
    "one worker": (lambda: DataLoader(Unsized(16), 4, num_workers=1), 4, False),
    "no worker": (lambda: DataLoader(Unsized(16), 4), 4, False),
}


@pytest.mark.quick("two workers read all", "they divide", "all samples are equal", "no worker")
@pytest.mark.parametrize("kind", CUT)
def test_workers_that_each_read_all_of_a_stream_without_a_length_are_named(kind: str) -> None:
    make, batches, named = CUT[kind]
    source = Iterated(make(), num_batches=batches)
    read(source, 2 * batches)
    assert len(source.notices) == named
    for what, hint in source.notices:
        assert "seems to read all of" in what
        assert "torch.utils.data.get_worker_info()" in hint


RAGGED: dict[str, tuple[int, int, int, int]] = {  # samples, batch, workers, batches
    "two": (10, 4, 2, 4),
    "three": (9, 2, 3, 6),
    "short parts": (3, 4, 2, 2),
}


@pytest.mark.quick("two")
@pytest.mark.parametrize("kind", RAGGED)
def test_workers_that_divide_the_samples_are_not_blamed_and_the_right_number_is_named(
    kind: str,
) -> None:
    samples, batch, workers, batches = RAGGED[kind]
    loader = DataLoader(Sized(samples, divides=True), batch, num_workers=workers)
    source = Iterated(loader)
    read(source, len(source))
    ((what, hint),) = source.notices
    assert f"its workers return {batches} batches" in what
    assert "reads all of" not in what
    assert f"Iterated(loader, num_batches={batches})" in hint
    source = Iterated(loader, num_batches=batches)
    assert sorted(read(source, batches)) == [float(number) for number in range(samples)]
    assert source.notices == []


class Endless:
    """Keeps its position as an attribute."""

    next = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.next += 1
            yield torch.tensor([float(self.next)])


class EndlessStream(Endless, IterableDataset[Any]):
    """The same as a dataset."""


class Drawing(Endless):
    """Keeps its position in a generator."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.tensor([self.generator.random()])


class KeepsIterator(Endless):
    """Returns the same iterator each time."""

    def __init__(self) -> None:
        self.batches = (torch.tensor([float(number)]) for number in itertools.count(1))

    def __iter__(self) -> Iterator[Any]:
        return self.batches


class KeepsState(Endless):
    """Keeps its position where only its state shows it."""

    def __init__(self) -> None:
        self.held = [0]

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.held[0] += 1
            yield torch.tensor([float(self.held[0])])

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.held[0]}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.held[0] = held["next"]


@pytest.mark.parametrize(
    "make",
    [
        Endless,
        Drawing,
        KeepsIterator,
        KeepsState,
        lambda: DataLoader(EndlessStream(), batch_size=None),
    ],
    ids=["an attribute", "a generator", "an iterator", "a state", "a dataset"],
)
def test_no_batch_of_a_stream_that_keeps_its_position_is_dropped(make: Callable[[], Any]) -> None:
    stream = iter(make())
    source = Iterated(make())
    found = read(source, 9)
    assert found == [next(stream).item() for _ in range(9)]
    assert len(source.notices) == 1


GUARANTEES: dict[str, tuple[Callable[[], Any], str]] = {
    "a stream with a length": (lambda: Sized(4), "replayed"),
    "a chain of streams": (lambda: ChainDataset([Sized(4), Sized(4)]), "replayed"),
    "a stream": (lambda: Unsized(4), "replayed"),
    "a loader": (lambda: DataLoader(Sized(4), 2), "replayed"),
    "a list": (lambda: [torch.zeros(1)], "proven"),
    "a dataset": (lambda: TensorDataset(torch.zeros(4)), "proven"),
}


@pytest.mark.parametrize("kind", GUARANTEES)
def test_a_loop_over_a_stream_is_not_called_proven(kind: str) -> None:
    make, guarantee = GUARANTEES[kind]
    assert find_guarantee(make())[0] == guarantee


@pytest.mark.parametrize("kind", ["a stream with a length", "a chain of streams", "a stream"])
def test_a_stream_is_no_dataset_whose_samples_have_an_index(kind: str) -> None:
    with pytest.raises(DataError, match="cannot be indexed") as caught:
        TorchDataset(GUARANTEES[kind][0]())
    assert "Iterated" in (caught.value.hint or "")
