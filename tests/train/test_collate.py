"""The samples of a map-style dataset are collated by the task, whatever microbatch reads them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from surefoot import Loss, Run, RunSpec
from surefoot.core.errors import DataError
from surefoot.data import Arrays
from tests.train.test_loader_resume import Left
from tests.world.ranks import run_ranks

SAMPLES = 22
TEXTS = [torch.arange(3.0 + 5 * number % 7) / 8 for number in range(SAMPLES)]


def pad(texts: list[Tensor]) -> Tensor:
    return pad_sequence(texts, batch_first=True, padding_value=-1.0)


class Drawing(Dataset[Any]):
    """Samples (number, random value), with a value from each global generator.

    Only the samples `of` draw; `read` has the number of each sample that was read.
    """

    def __init__(self, of: range = range(SAMPLES)) -> None:
        self.of, self.read = of, list[int]()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        drawn = 0.0
        if number in self.of:
            drawn = torch.rand(()).item() + random.random() + float(np.random.rand())  # noqa: NPY002
        return float(number), drawn


class Many(Drawing):
    """Reads all samples of a batch with one call."""

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]


class Collator:
    """An object that is called, as those of transformers are."""

    def __call__(self, texts: list[Tensor]) -> Tensor:
        return pad(texts)


class Task:
    def __init__(self, dataset: Any, collate: Any = None) -> None:
        self.dataset = dataset
        if collate is not None:
            self.collate = collate
        self.seen = dict[tuple[int, float], list[float]]()

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, split: str) -> Any:
        return self.dataset if split == "train" else Arrays(torch.zeros(4))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        values = batch if isinstance(batch, Tensor) else batch[-1]
        return model(values.float().reshape(-1, 1))[values.flatten() >= 0]  # type: ignore[no-any-return]

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum((output - 1).square().sum(), count=len(output))


class Noting(Task):
    """Notes the random value of each sample, in the order of the steps."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.drawn = list[tuple[float, float]]()

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            self.drawn += zip(batch[0].tolist(), batch[1].tolist(), strict=True)
        return super().forward(model, batch)


def train(
    folder: Path, task: Task, leave_at: int | None = None, **tables: Any
) -> tuple[list[float], list[Tensor], list[str]]:
    """The losses, the weights at the end, and what was said at the start."""
    size = {} if isinstance(task.dataset, DataLoader) else {"batch": 8}
    spec = RunSpec(
        **{
            "train": {"length": "2 epochs", "threads": 1} | size | tables.pop("train", {}),
            "optim": {"name": "sgd", "lr": 0.1},
            "evaluate": {"every": "1000 steps"},
            "checkpoint": {"every": "1 steps", "background": False},
            "observe": {"tensorboard": False},
            **tables,
        }
    )
    losses, weights, told = list[float](), list[Tensor](), list[str]()
    try:
        with Run(spec, task, folder=folder, quiet=True) as run:
            told = [*run.assembly.warnings, *run.assembly.told]
            for report in run.steps():
                losses.append(report.loss)
                if report.step == leave_at:
                    raise Left
            weights = [each.detach().clone() for each in run.model.parameters()]
    except Left:
        pass
    return losses, weights, told


class Method(Task):
    def collate(self, samples: list[Tensor]) -> Tensor:
        return pad(samples)


class Listed(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        return TEXTS[number]


def quarters() -> Any:
    halves = [Subset(Listed(), range(11)), Subset(Listed(), range(11, SAMPLES))]
    return ConcatDataset(halves)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Method(TEXTS),
        lambda: Task(TEXTS, Collator()),
        lambda: Task(Listed(), pad),
        lambda: Task(quarters(), pad),
    ],
    ids=["a method", "an object", "a dataset", "parts"],
)
def test_what_collates_is_the_task_s_own(make: Callable[[], Task], tmp_path: Path) -> None:
    losses, weights, _ = train(tmp_path / "whole", make())
    assert len(losses) == 6
    for number, tables in enumerate(({"train": {"microbatch": 2}}, {"loader": {"workers": 2}})):
        found, others, told = train(tmp_path / str(number), make(), **tables)
        assert found == pytest.approx(losses, rel=1e-6)
        torch.testing.assert_close(others, weights, rtol=1e-6, atol=1e-7)
        assert not any("collate" in each for each in told)
    train(tmp_path / "stopped", make(), leave_at=3)
    _, others, _ = train(tmp_path / "stopped", make())
    assert all(map(torch.equal, others, weights))


KINDS: dict[str, Callable[[], Drawing]] = {
    "all": Drawing,
    "all at once": Many,
    "few": lambda: Drawing(range(13, 15)),
    "few at once": lambda: Many(range(13, 15)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_draws_depend_on_the_sample_alone(kind: str, tmp_path: Path) -> None:
    def draws(name: str, **tables: Any) -> list[tuple[float, float]]:
        task = Noting(KINDS[kind]())
        train(tmp_path / name, task, **tables)
        return task.drawn[-2 * SAMPLES :]

    whole = draws("whole")
    assert len(set(whole)) == len(whole) or kind.startswith("few")
    assert draws("parts", train={"microbatch": 1}) == whole
    assert draws("steps", train={"batch": 11, "microbatch": 11}) == whole
    assert draws("workers", loader={"workers": 2}) == whole


def test_ranks_draw_as_one_process(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        task = Noting(Drawing())
        train(tmp_path / "ranks", task)
        return task.drawn

    task = Noting(Drawing())
    train(tmp_path / "one", task)
    found = {tuple(each) for drawn in run_ranks(2, job, tmp_path / "jobs") for each in drawn}
    assert set(task.drawn) <= found


def test_a_loader_by_sample_draws_the_same(tmp_path: Path) -> None:
    dataset, loader = Noting(Drawing()), Noting(DataLoader(Drawing(), 4, shuffle=True))
    train(tmp_path / "dataset", dataset)
    train(tmp_path / "loader", loader, data={"draws": "sample"})
    assert set(dataset.drawn[-2 * SAMPLES :]) == set(loader.drawn[-2 * SAMPLES :])


@pytest.mark.parametrize(("of", "twice"), [(range(0), 0), (range(SAMPLES), 8)])
def test_a_dataset_that_draws_nothing_is_read_once(of: range, twice: int, tmp_path: Path) -> None:
    from surefoot.components.data.loader.jobs import Reader
    from surefoot.data import TorchDataset

    dataset = Drawing(of)
    reader = Reader(TorchDataset(dataset), None, 0)
    for start in (0, 8):
        reader(0, np.arange(start, start + 8))
    assert len(dataset.read) == 16 + twice


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_cannot_be_stacked_are_named_with_their_shapes(
    workers: int, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        train(tmp_path / "run", Task(TEXTS), loader={"workers": workers})
    assert ": (3,), " in caught.value.message
    assert "default_collate failed for the samples" in caught.value.message
    assert "collate(samples)" in (caught.value.hint or "")


def test_an_error_in_collate_names_the_samples(tmp_path: Path) -> None:
    def fails(texts: list[Tensor]) -> Tensor:
        if any(len(text) == 8 for text in texts):
            raise RuntimeError("no eight")
        return pad(texts)

    with pytest.raises(DataError, match=r"fails failed for the samples .*: \(8,\).*no eight"):
        train(tmp_path / "run", Task(TEXTS, fails))


def mix(texts: list[Tensor]) -> Tensor:
    batch = pad(texts)
    return (batch + batch.flip(0)) / 2


@pytest.mark.parametrize(("collate", "is_named"), [(mix, True), (pad, False)])
def test_a_collate_function_that_mixes_samples_is_named(
    collate: Any, is_named: bool, tmp_path: Path
) -> None:
    same = [torch.arange(4.0) + number for number in range(SAMPLES)]
    _, _, told = train(tmp_path / "cut", Task(same, collate), train={"microbatch": 2})
    assert any("collate function returns other values" in each for each in told) == is_named
    _, _, told = train(tmp_path / "whole", Task(same, collate))
    assert not any("collate function" in each for each in told)


def test_a_collate_method_that_is_not_used_is_named(tmp_path: Path) -> None:
    words = "collate(samples) of task method is not called"
    other = Method(DataLoader(TEXTS, 4, collate_fn=pad))  # type: ignore[arg-type]
    assert any(words in each for each in train(tmp_path / "other", other)[2])
    arrays = Method(Arrays(torch.rand(8)))
    assert any(words in each for each in train(tmp_path / "arrays", arrays)[2])
    own = Method(None)
    own.dataset = DataLoader(TEXTS, 4, collate_fn=own.collate)  # type: ignore[arg-type]
    assert not any(words in each for each in train(tmp_path / "own", own)[2])


@pytest.mark.parametrize("collate", [None, lambda samples: samples[0]])
def test_a_trial_that_writes_into_its_batch_leaves_the_samples_as_they_are(
    collate: Any, tmp_path: Path
) -> None:
    class Writes(Task):
        def data(self, split: str) -> Any:
            return held

        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            made = super().forward(model, batch.clone())
            batch.fill_(1e6)
            return made

    held = [torch.full((2,), float(number)) for number in range(8)]
    task = Writes(held, collate)
    spec = RunSpec(
        train={"length": "1 steps", "batch": 1, "threads": 1}, observe={"tensorboard": False}
    )
    with Run(spec, task, folder=tmp_path / "run", quiet=True):
        pass
    assert [each.tolist() for each in held] == [[float(n)] * 2 for n in range(8)]


def test_samples_of_a_wide_source_are_converted_and_drawn_alike() -> None:
    from surefoot.components.data.loader.jobs import Reader
    from surefoot.data import TorchDataset
    from surefoot.prove.layouts.wide import WideSource

    ids = np.arange(4)
    plain = Reader(TorchDataset(Drawing()), None, 3)(0, ids).batch
    wide: Any = WideSource(TorchDataset(Drawing()), lambda tensor: tensor.double() * 2)
    found = Reader(wide, None, 3)(0, ids).batch
    assert found[1].dtype == torch.float64
    assert torch.equal(found[1], plain[1].double() * 2)


def test_a_wide_task_collates_as_the_task_and_has_its_splits() -> None:
    from surefoot.contract.task import resolve
    from surefoot.prove.layouts.wide import Wide

    class TrainOnly(Method):
        def data(self, split: str) -> Any:
            return self.dataset if split == "train" else None

    wide = Wide(resolve(TrainOnly(TEXTS)))
    batch = wide.data("train").read(np.arange(4))
    assert batch.dtype == torch.float64
    assert torch.equal(batch, pad(TEXTS[:4]).double())
    assert wide.data("test") is None
