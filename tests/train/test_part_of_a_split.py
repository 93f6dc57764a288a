"""`evaluate.batches`: an evaluation reads at most so many batches of a split."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from surefoot import Loss, Run, RunSpec
from surefoot.contract import events
from surefoot.core.errors import SurefootError
from surefoot.metrics import Mean
from surefoot.train.look_back import evaluate_run
from surefoot.train.run import drive
from tests.world.ranks import run_ranks

NUM, BATCH = 50, 4  # samples of the evaluated split, and of a batch


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are their numbers, with a random number that the dataset draws."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.rand(1)


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream of numbered samples without a length."""

    def __iter__(self) -> Any:
        return iter(Numbered(NUM))


KINDS = {
    "tensors": lambda: (torch.arange(NUM, dtype=torch.float32)[:, None], torch.zeros(NUM, 1)),
    "dataset": lambda: Numbered(NUM),
    "list": lambda: [(torch.tensor([float(index)]), torch.zeros(1)) for index in range(NUM)],
    "loader": lambda: DataLoader(Numbered(NUM), batch_size=BATCH),
    "workers": lambda: DataLoader(Numbered(NUM), batch_size=BATCH, num_workers=2),
    "lasting workers": lambda: DataLoader(
        Numbered(NUM), batch_size=BATCH, num_workers=2, persistent_workers=True
    ),
    "stream": lambda: DataLoader(Endless(), batch_size=BATCH),
}


class Look:
    """A task that notes the samples of each evaluation; no step moves its only weight by much."""

    def __init__(self, kind: str = "tensors") -> None:
        self.kind = kind
        self.seen: list[list[tuple[float, float]]] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, split: str) -> Any:
        if split == "train":
            return torch.ones(8, 1), torch.zeros(8, 1)
        return KINDS[self.kind]()

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(output.square().sum(), count=len(output))

    def metrics(self, output: Tensor, batch: Any) -> Any:
        pairs = [*zip(batch[0].flatten().tolist(), batch[1].flatten().tolist(), strict=True)]
        self.seen.append(pairs)
        return {"number": Mean(batch[0].sum(), len(batch[0]))}


def spec_of(**evaluate: Any) -> RunSpec:
    return RunSpec(
        train={"length": "4 steps", "batch": 4, "threads": 1},
        evaluate={"every": "2 steps", "batch": BATCH, **evaluate},
        checkpoint={"every": "1 steps", "background": False},
        observe={"tensorboard": False},
    )


def train(folder: Path, task: Look, **evaluate: Any) -> list[events.Evaluated]:
    """Train; drop what the checks before the run have seen."""
    with Run(spec_of(**evaluate), task, folder=folder, quiet=True) as run:
        task.seen.clear()
        drive(run)
    return [each for each in events.read(folder) if isinstance(each, events.Evaluated)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_evaluation_reads_the_same_few_batches(kind: str, tmp_path: Path) -> None:
    task = Look(kind)
    found = train(tmp_path / "run", task, batches=3)
    spread = kind in ("tensors", "dataset", "list")
    numbers = [index * NUM // 12 for index in range(12)] if spread else [*range(12)]
    assert [each.num_samples for each in found] == [12, 12]
    assert len(task.seen) == 6
    first, second = [*chain(*task.seen[:3])], [*chain(*task.seen[3:])]
    assert first == second
    assert [number for number, _ in first] == numbers
    assert {each.metrics["number"] for each in found} == {float(np.mean(numbers))}


def test_what_a_dataset_draws_is_what_it_draws_in_a_whole_evaluation(tmp_path: Path) -> None:
    part, whole = Look("dataset"), Look("dataset")
    train(tmp_path / "part", part, batches=3)
    train(tmp_path / "whole", whole)
    drawn = dict([*chain(*whole.seen[: -(-NUM // BATCH)])])
    assert len(drawn) == NUM
    assert all(drawn[number] == value for number, value in [*chain(*part.seen)])


@pytest.mark.parametrize("batches", [13, 14, 10**9])
def test_a_limit_beyond_the_split_reads_each_sample_once(batches: int, tmp_path: Path) -> None:
    task = Look()
    found = train(tmp_path / "run", task, batches=batches)
    assert [each.num_samples for each in found] == [NUM, NUM]
    assert [number for number, _ in [*chain(*task.seen[:13])]] == [*map(float, range(NUM))]


def test_the_verb_reads_the_whole_split(tmp_path: Path) -> None:
    spec = spec_of(batches=3).model_dump(exclude_unset=True)
    spec["task"] = {"use": f"{__file__}:Look", "kind": "list"}
    with Run(RunSpec(**spec), folder=tmp_path / "run", quiet=True) as run:
        drive(run)
    results, _ = evaluate_run(tmp_path / "run", "last", None, None)
    assert results[0].num_samples == NUM


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2 steps"])
def test_a_limit_is_a_whole_number_of_batches(wrong: Any) -> None:
    with pytest.raises(SurefootError, match=r"evaluate\.batches|batches"):
        spec_of(batches=wrong)


def test_ranks_share_the_batches_of_a_part(tmp_path: Path) -> None:
    one = train(tmp_path / "one", Look(), batches=3)

    def job(rank: int) -> Any:
        train(tmp_path / "two", task := Look(), batches=3)
        return len(task.seen)

    assert run_ranks(2, job, tmp_path / "ranks") == [4, 2]
    found = [each for each in events.read(tmp_path / "two") if isinstance(each, events.Evaluated)]
    shown = [(each.num_samples, each.loss, each.metrics) for each in found]
    assert shown == [(each.num_samples, each.loss, each.metrics) for each in one]


class Broken(Numbered):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 25:
            raise ValueError("broken")
        return super().__getitem__(index)


def test_an_unreadable_sample_of_a_part_is_named_by_its_number(tmp_path: Path) -> None:
    class Task(Look):
        def data(self, split: str) -> Any:
            return super().data(split) if split == "train" else Broken(NUM)

    spec = spec_of(batches=3).replace(data={"on_bad": "skip", "max_bad": 0.5})
    with Run(spec, Task(), folder=tmp_path / "run", quiet=True) as run:
        drive(run)
    told = [each for each in events.read(tmp_path / "run") if isinstance(each, events.Fault)]
    assert any("sample 25 cannot be read" in each.detail for each in told)
    found = [each for each in events.read(tmp_path / "run") if isinstance(each, events.Evaluated)]
    assert [each.num_samples for each in found] == [11, 11]
