"""What a loop sets in its own DataLoader after it was given, has an effect from the next epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate, get_worker_info

import surefoot
from surefoot.components.data.sources.watched import ObservedLoader

ROWS = list(range(8))


def add_hundred(rows: list[int]) -> Any:
    return default_collate([each + 100 for each in rows])


def start_worker(number: int) -> None:
    get_worker_info().dataset[:] = [each + 100 for each in ROWS]  # type: ignore[union-attr]


def set_collate(loader: DataLoader[int]) -> None:
    loader.collate_fn = add_hundred


def set_worker_start(loader: DataLoader[int]) -> None:
    loader.worker_init_fn = start_worker


def set_worker_count(loader: DataLoader[int]) -> None:
    loader.num_workers = 0


def set_generator(loader: DataLoader[int]) -> None:
    loader.sampler.generator = torch.Generator().manual_seed(5)  # type: ignore[attr-defined]


CHANGES: dict[str, tuple[Callable[[DataLoader[int]], None], dict[str, Any]]] = {
    "collate_fn": (set_collate, {}),
    "worker_init_fn": (set_worker_start, {"num_workers": 1}),
    "num_workers": (set_worker_count, {"num_workers": 2, "worker_init_fn": start_worker}),
    "generator": (set_generator, {"shuffle": True}),
}


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_has_the_effect_that_it_has_in_a_plain_loop(name: str) -> None:
    change, settings = CHANGES[name]
    plain, given = (DataLoader(list(ROWS), 4, **settings) for _ in range(2))
    observed = ObservedLoader(given)
    assert observed.knows_samples
    for loader, epoch in ((plain, lambda: iter(plain)), (given, observed.iterate)):
        torch.manual_seed(0)
        loader_read = [read(epoch())]
        change(loader)
        loader_read.append(read(epoch()))
        assert loader_read[0] != loader_read[1]
        if loader is plain:
            expected = loader_read
    assert loader_read == expected


def test_an_attached_loop_reads_what_its_loader_is_set_to(tmp_path: Path) -> None:
    model, loader = nn.Linear(1, 1), DataLoader(ROWS, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with surefoot.attach(
        model=model, optimizer=optimizer, data=loader, folder=tmp_path / "a", save=None
    ) as run:
        assert read(run.batches()) == [ROWS[:4], ROWS[4:]]
        loader.collate_fn = add_hundred
        assert read(run.batches()) == [[100, 101, 102, 103], [104, 105, 106, 107]]
