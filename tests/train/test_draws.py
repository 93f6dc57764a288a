"""Tasks whose augmentation draws from the streams of the process.

Workers have others, which is told before the first step.
"""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.contract.events import Started
from surefoot.train.run import Run
from tests.train.small import Small, records, spec

DRAWS = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002
    "python": random.random,
}


class Careless(Small):
    def __init__(self, stream: str) -> None:
        super().__init__()
        self.stream = stream

    def augment(self, batch: Any, keys: Any) -> Any:
        return batch[0] + DRAWS[self.stream](), batch[1]


def told(folder: Path, task: Small, loader: dict[str, Any]) -> list[str]:
    with Run(spec(2, loader=loader), task, folder=folder, quiet=True):
        (begun,) = (event for event in records(folder) if isinstance(event, Started))
    return [each for each in begun.notes if "random generators" in each]


@pytest.mark.parametrize("stream", DRAWS)
def test_draws_that_workers_would_change_are_told(stream: str, tmp_path: Path) -> None:
    found = told(tmp_path / "process", Careless(stream), {"workers": 2, "kind": "process"})
    assert len(found) == 1
    assert "with loader.workers = 2 the random numbers differ from those without" in found[0]
    assert "the keys of augment give the same numbers everywhere" in found[0]
    assert told(tmp_path / "auto", Careless(stream), {"workers": "auto"})


def test_draws_that_are_the_same_everywhere_are_not_told(tmp_path: Path) -> None:
    assert told(tmp_path / "alone", Careless("numpy"), {}) == []
    assert told(tmp_path / "keys", Small(), {"workers": 2}) == []


class Own(torch.utils.data.Dataset[Any]):
    """Draws for each sample from `stream`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> Any:
        return torch.full((4,), float(number) + float(self.stream())), number % 3


class Given(Small):
    """Trains on a map-style dataset, whose samples are read by their number."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream

    def data(self, split: str) -> Any:
        return Own(self.stream)


OWN = {
    "a generator of torch": (
        lambda: functools.partial(torch.rand, (), generator=torch.Generator()),
        True,
    ),
    "a generator of NumPy": (lambda: np.random.default_rng(0).random, True),
    "a generator of Python": (lambda: random.Random(0).random, True),
    "a counter": (lambda: itertools.count().__next__, True),
    "nothing": (lambda: lambda: 0.0, False),
    **{
        f"the global stream of {name}": (lambda draw=draw: draw, False)
        for name, draw in DRAWS.items()
    },
}


@pytest.mark.parametrize("kind", OWN)
def test_a_dataset_with_a_generator_of_its_own_is_reported(kind: str, tmp_path: Path) -> None:
    make, is_reported = OWN[kind]
    with Run(spec(2), Given(make()), folder=tmp_path / "run", quiet=True):
        (begun,) = (event for event in records(tmp_path / "run") if isinstance(event, Started))
    assert (
        any("two reads of the same samples return different values" in note for note in begun.notes)
        is is_reported
    )
