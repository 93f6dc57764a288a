"""A model or a loss that writes into its batch is named before step 1.

It changes the data where the batch is their own memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import surefoot
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.events import Started
from surefoot.contract.task import Loss
from surefoot.train.run import Run
from tests.train.small import Small, faults_of, records, spec

NOTICE = "changes its batch in place, and the batch shares memory with the data"


def samples() -> tuple[Tensor, Tensor]:
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3


class Views:
    """A source of one's own that gives views of its tensors."""

    guarantee, digest = "proven", "views"

    def __init__(self) -> None:
        self.x, self.y = samples()

    def __len__(self) -> int:
        return 6

    def read(self, ids: np.ndarray) -> Any:
        number = int(ids[0])
        return self.x[4 * number : 4 * number + 4], self.y[4 * number : 4 * number + 4]

    def describe(self) -> str:
        return "views"


class Items(Dataset[Any]):
    """Arrays of NumPy, as torch sees them."""

    def __init__(self) -> None:
        self.x, self.y = (each.numpy() for each in samples())

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        place = slice(4 * number, 4 * number + 4)
        return torch.from_numpy(self.x[place]), torch.from_numpy(self.y[place])


def cut() -> list[tuple[Tensor, Tensor]]:
    x, y = samples()
    return list(zip(x.split(4), y.split(4), strict=True))


def first(batch: list[Any]) -> Any:
    return batch[0]


SHARED = {
    "a source of views": Views,
    "batches of a list": lambda: DataLoader(cut(), batch_size=None),  # type: ignore[arg-type]
    "a dataset over arrays": lambda: DataLoader(Items(), batch_size=None, shuffle=True),
    "a collate function that copies nothing": lambda: DataLoader(
        cut(), batch_size=1, collate_fn=first
    ),  # type: ignore[arg-type]
}
COPIED = {
    "arrays": lambda: Arrays(*samples()),
    "tensors": samples,
    "a list of samples": lambda: list(zip(*samples(), strict=True)),
    "a DataLoader that collates": lambda: DataLoader(TensorDataset(*samples()), batch_size=4),
    "workers": lambda: DataLoader(cut(), batch_size=None, num_workers=1),  # type: ignore[arg-type]
}


class Writing(Small):
    """Multiplies what it is given in place: always, in training alone, or in the loss."""

    def __init__(self, make: Any, where: str) -> None:
        super().__init__()
        self.made, self.where = make(), where

    augment = None  # type: ignore[assignment]

    def data(self, split: str) -> Any:
        return self.made if split == "train" else Arrays(*samples())

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if self.where == "forward" or (self.where == "training" and model.training):
            batch[0].mul_(2.0)
        output: Tensor = model(batch[0] * 2)
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        if self.where == "loss":
            batch[0][:1].zero_()  # through a view
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))


def told(
    task: Writing, folder: Path, capfd: pytest.CaptureFixture[str], steps: int = 2
) -> list[str]:
    tables: dict[str, Any] = (
        {"train": {"batch": 1}} if isinstance(task.made, DataLoader | Views) else {}
    )
    with Run(spec(steps, **tables), task, folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
    return [line for line in capfd.readouterr().err.splitlines() if NOTICE in line]


@pytest.mark.parametrize("where", ["forward", "training", "loss"])
@pytest.mark.parametrize("kind", SHARED)
def test_a_run_names_a_pass_that_changes_its_data(
    kind: str, where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = told(Writing(SHARED[kind], where), tmp_path, capfd)
    assert len(said) == 1
    assert "x = x * 2 instead of x.mul_(2)" in said[0]
    faults = faults_of(tmp_path)
    started = records(tmp_path)[0]
    assert isinstance(started, Started)
    assert [each for each in started.notes if NOTICE in each]
    assert not faults


@pytest.mark.parametrize("where", ["forward", "nowhere"])
@pytest.mark.parametrize("kind", COPIED)
def test_a_pass_that_writes_into_a_copy_is_no_fault(
    kind: str, where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(Writing(COPIED[kind], where), tmp_path, capfd) == []


@pytest.mark.parametrize("kind", SHARED)
def test_a_pass_that_writes_nothing_is_no_fault(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(Writing(SHARED[kind], "nowhere"), tmp_path, capfd) == []


def test_the_checks_before_a_run_change_no_data(tmp_path: Path) -> None:
    task = Writing(Views, "forward")
    before = task.made.x.clone()
    with Run(spec(2, train={"batch": 1}), task, folder=tmp_path, quiet=True):
        assert torch.equal(task.made.x, before)


class Growing(Dataset[Any]):
    """Changes what it holds as it reads."""

    def __init__(self) -> None:
        self.x, self.y = samples()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> Any:
        return self.x[number].mul_(2.0), self.y[number]


def test_a_dataset_that_changes_its_samples_as_it_reads_them_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Run(spec(2), Writing(Growing, "nowhere"), folder=tmp_path, quiet=True) as run:
        list(run.steps())
    assert "or changes its samples in place" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("data", "writes", "num"),
    [
        (cut, True, 1),
        (cut, False, 0),
        (COPIED["a DataLoader that collates"], True, 0),
        (SHARED["a dataset over arrays"], True, 1),
    ],
    ids=["a list", "a list that is read", "a DataLoader that collates", "a dataset over arrays"],
)
def test_an_attached_loop_is_told_once_that_it_changes_its_data(
    data: Any, writes: bool, num: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with surefoot.attach(model=model, optimizer=optimizer, data=data(), folder=tmp_path) as run:
        for _ in range(2):
            for x, y in run.batches():
                loss = F.cross_entropy(model(x.mul_(2) if writes else x * 2), y)
                loss.backward()
                optimizer.step()
                run.step_done(loss)
    said = [line for line in capfd.readouterr().err.splitlines() if f"the loop {NOTICE}" in line]
    faults = faults_of(tmp_path)
    assert len(said) == num
    assert [(each.fault, each.step) for each in faults] == [("changed-data", 1)] * num
