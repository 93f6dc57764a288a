"""A run whose data is a DataLoader resumes with the batches of a run that was never stopped.

Or it says what differs.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract import events, loop_ledger
from surefoot.core.errors import OtherDataError, RunError
from tests.train.small import faults_of

SAMPLES, BATCH, EPOCHS = 18, 4, 3  # the last batch of an epoch is short
UNSAVED = "1000 steps"  # a commit at the end alone
NUMBERS: Any = [(float(number), number) for number in range(SAMPLES)]


class Left(Exception):
    """What ends a run in the middle, as a kill would."""


class Augmented(Dataset[Any]):
    """Draws from the global streams, as augmentation does."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return number + torch.rand(()).item() / 8 + random.random() / 8 + float(
            np.random.rand()  # noqa: NPY002
        ) / 8, number


class Own(Dataset[Any]):
    """Draws from a generator of its own, which is an attribute."""

    def __init__(self) -> None:
        self.generator = random.Random(5)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return number + self.draw() / 2, number

    def draw(self) -> float:
        return self.generator.random()


class Hidden(Own):
    """Draws from a generator that nobody can find."""

    def __init__(self) -> None:
        self.draws = (each.random() for each in itertools.repeat(random.Random(5)))

    def draw(self) -> float:
        return next(self.draws)


class ByEpoch:
    """A batch sampler whose order is a function of the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(
            SAMPLES, generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        return iter([order[:4], order[4:10], order[10:]])


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(NUMBERS, BATCH, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(
        NUMBERS, BATCH, shuffle=True, generator=own_generator()
    ),
    "in order": lambda: DataLoader(NUMBERS, BATCH),
    "the last batch dropped": lambda: DataLoader(NUMBERS, BATCH, shuffle=True, drop_last=True),
    "with replacement": lambda: DataLoader(
        NUMBERS, BATCH, sampler=RandomSampler(NUMBERS, replacement=True, num_samples=SAMPLES)
    ),
    "of a subset": lambda: DataLoader(
        NUMBERS, BATCH, sampler=SubsetRandomSampler(range(3, SAMPLES))
    ),
    "weighted": lambda: DataLoader(
        NUMBERS,
        BATCH,
        sampler=WeightedRandomSampler([1.0] * 17 + [9.0], SAMPLES, generator=own_generator()),
    ),
    "a batch sampler": lambda: DataLoader(
        NUMBERS,
        batch_sampler=BatchSampler(RandomSampler(NUMBERS, generator=own_generator()), 5, False),
    ),
    "distributed": lambda: DataLoader(
        NUMBERS, BATCH, sampler=DistributedSampler(NUMBERS, num_replicas=1, rank=0)
    ),
    "by epoch": lambda: DataLoader(NUMBERS, batch_sampler=ByEpoch()),
    "with a generator of its own": lambda: DataLoader(Own(), BATCH, shuffle=True),
    "augmented": lambda: DataLoader(Augmented(), BATCH, shuffle=True),
    "augmented by workers": lambda: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2),
    "workers and a generator": lambda: DataLoader(
        Augmented(), BATCH, shuffle=True, num_workers=1, generator=own_generator()
    ),
    "workers that stay": lambda: DataLoader(
        NUMBERS, BATCH, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "workers that stay and a generator": lambda: DataLoader(
        NUMBERS,
        BATCH,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
        generator=own_generator(),
    ),
}


class Task:
    """Remembers what it was trained on."""

    def __init__(self, loader: Any, judged: Any = None) -> None:
        self.loader, self.judged, self.seen = loader, judged, list[list[float]]()

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, split: str) -> Any:
        if split == "train":
            return self.loader
        return Arrays(torch.zeros(4)) if self.judged is None else self.judged

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        values = batch[0] if isinstance(batch, list | tuple) else batch
        if model.training:
            self.seen.append([round(float(value), 5) for value in values.flatten()])
        return model(values.float().reshape(-1, 1) / 100)  # type: ignore[no-any-return]

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum((output - 1).square().sum(), count=len(output))


def spec_for(steps: int, **checkpoint: Any) -> RunSpec:
    table = {"every": "1 steps", "background": False} | checkpoint
    return RunSpec(
        train={"length": f"{steps} steps", "threads": 1},
        evaluate={"every": "1000 steps"},
        checkpoint=table,
        observe={"tensorboard": False},
    )


def train(
    folder: Path,
    task: Task,
    steps: int,
    leave_at: int | None = None,
    every: str = "1 steps",
    **how: Any,
) -> list[list[float]]:
    try:
        with Run(spec_for(steps, every=every), task, folder=folder, quiet=True, **how) as run:
            for report in run.steps():
                if report.step == leave_at:
                    raise Left
    except (Left, RunError):
        assert leave_at is not None
    return task.seen


def resumed(folder: Path, make: Callable[[], Any], steps: int, *stops: int) -> list[list[float]]:
    """The batches that count of a run that is left after each of these steps.

    The step after a save is done again.
    """
    seen: list[list[float]] = []
    for stop in (*stops, None):
        done = train(folder, Task(make()), steps, leave_at=stop)
        first = next(
            event.first_step
            for event in reversed(list(events.read(folder)))
            if isinstance(event, events.Started)
        )
        seen[first - 1 :] = done
    return seen


@pytest.mark.quick("workers that stay and a generator", "of a subset")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_run_trains_on_the_batches_of_an_unbroken_one(kind: str, tmp_path: Path) -> None:
    make = LOADERS[kind]
    per_epoch = len(make())
    steps = EPOCHS * per_epoch
    unbroken = train(tmp_path / "whole", Task(make()), steps, every=UNSAVED)
    assert len(unbroken) == steps
    # in the middle of an epoch, in the middle of another, and just as one ends
    stopped = resumed(tmp_path / "stopped", make, steps, 2, per_epoch + 2, 2 * per_epoch + 1)
    assert stopped == unbroken
    found = loop_ledger.check(tmp_path / "stopped")
    assert found.holds
    if found.promise.all:
        assert found.num_samples == EPOCHS * SAMPLES


@pytest.mark.quick("shuffled by a generator")
@pytest.mark.parametrize(
    "kind",
    ["shuffled by a generator", "a batch sampler", "weighted", "with a generator of its own"],
)
def test_a_run_that_resumes_at_the_end_of_an_epoch_reads_the_next_one(
    kind: str, tmp_path: Path
) -> None:
    make = LOADERS[kind]
    size = len(make())
    unbroken = train(tmp_path / "whole", Task(make()), 3 * size, every=UNSAVED)
    assert resumed(tmp_path / "stopped", make, 3 * size, size + 1, 2 * size + 1) == unbroken


@pytest.mark.quick("shuffled", "by epoch", "workers that stay")
@pytest.mark.parametrize("kind", ["shuffled", "distributed", "by epoch", "workers that stay"])
def test_each_epoch_has_an_order_of_its_own(kind: str, tmp_path: Path) -> None:
    loader = LOADERS[kind]()
    seen = train(tmp_path / "run", Task(loader), 3 * len(loader), every=UNSAVED)
    epochs = [seen[at : at + len(loader)] for at in range(0, len(seen), len(loader))]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert all(
        sorted(value for batch in epoch for value in batch) == [float(n) for n in range(SAMPLES)]
        for epoch in epochs
    )


class Shuffling(IterableDataset[Any]):
    """A stream that counts its passes.

    In a fresh process the third one comes in the order of the first.
    """

    def __init__(self) -> None:
        self.orders = (each.sample(range(16), 16) for each in itertools.repeat(random.Random(3)))

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[float]:
        return map(float, next(self.orders))


class Changing(torch.utils.data.Sampler[int]):
    """An order that nobody can draw again."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(SAMPLES), SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a stream with a generator of its own": (
        lambda: DataLoader(Shuffling(), 4),
        "are not those trained on",
    ),
    "a sampler from the system's randomness": (
        lambda: DataLoader(NUMBERS, BATCH, sampler=Changing()),
        "contain different samples",
    ),
}


@pytest.mark.quick(
    "a stream with a generator of its own-11", "a sampler from the system's randomness-13"
)
@pytest.mark.parametrize("stop", [11, 13])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_data_stop_a_resumed_run_before_it_trains_a_step(
    kind: str, stop: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make, what = OTHERS[kind]
    train(tmp_path / "run", Task(make()), 14, leave_at=stop + 1)
    size = (tmp_path / "run" / "events.jsonl").stat().st_size
    task = Task(make())
    with pytest.raises(OtherDataError, match=what) as caught:
        train(tmp_path / "run", task, 14)
    assert "--accept-data" in (caught.value.hint or "")
    assert task.seen == []
    assert (tmp_path / "run" / "events.jsonl").stat().st_size == size
    train(tmp_path / "run", Task(make()), 14, accept_data=True)
    assert [fault.fault for fault in faults_of(tmp_path / "run")] == ["other-data"]
    assert what in capfd.readouterr().err


def test_the_end_of_an_epoch_of_a_stream_is_checked_by_the_first_batch_of_that_epoch(
    tmp_path: Path,
) -> None:
    make = OTHERS["a stream with a generator of its own"][0]
    # the checkpoint is after step 12, the end of the third epoch
    train(tmp_path / "run", Task(make()), 16, leave_at=13)
    with pytest.raises(OtherDataError, match="first batch of the previous epoch"):
        train(tmp_path / "run", Task(make()), 16)


def test_a_stream_that_counts_its_passes_resumes_in_the_first_one(tmp_path: Path) -> None:
    make = OTHERS["a stream with a generator of its own"][0]
    unbroken = train(tmp_path / "whole", Task(make()), 8, every=UNSAVED)
    assert resumed(tmp_path / "stopped", make, 8, 3) == unbroken


def test_the_same_samples_with_other_values_are_reported_and_the_run_resumes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", Task(DataLoader(Hidden(), BATCH)), 10, leave_at=8)
    assert "other values" not in capfd.readouterr().err
    train(tmp_path / "run", Task(DataLoader(Hidden(), BATCH)), 10)
    assert "has the same samples whose values have changed" in capfd.readouterr().err
    assert loop_ledger.check(tmp_path / "run").num_samples == 2 * SAMPLES


class CountingSampler(torch.utils.data.Sampler[int]):
    """Counts its passes by itself, and has a different order in each."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(
            torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.passes)).tolist()
        )

    def __len__(self) -> int:
        return SAMPLES


class OneShot:
    """A batch sampler whose batches are iterators."""

    def __init__(self, shuffle: bool) -> None:
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[Iterator[int]]:
        order = (
            random.SystemRandom().sample(range(SAMPLES), SAMPLES)
            if self.shuffle
            else list(range(SAMPLES))
        )
        return (iter(order[at : at + 6]) for at in range(0, SAMPLES, 6))

    def __len__(self) -> int:
        return 3


@pytest.mark.quick("7", "12")
@pytest.mark.parametrize("stop", [5, 10, 15, 7, 12])
def test_a_sampler_that_counts_its_passes_resumes_right_or_is_refused(
    stop: int, tmp_path: Path
) -> None:
    def make() -> Any:
        return DataLoader(NUMBERS, BATCH, sampler=CountingSampler())

    unbroken = train(tmp_path / "whole", Task(make()), 20, every=UNSAVED)
    train(tmp_path / "run", Task(make()), 20, leave_at=stop + 1)
    task = Task(make())
    try:
        train(tmp_path / "run", task, 20)
    except OtherDataError:
        assert task.seen == []
        assert stop > 5
    else:
        assert task.seen == unbroken[stop:]


def test_the_end_of_an_epoch_reports_a_dataset_that_draws_from_its_own_generator(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", Task(DataLoader(Hidden(), BATCH)), 14, leave_at=11)
    assert "other values" not in capfd.readouterr().err
    train(tmp_path / "run", Task(DataLoader(Hidden(), BATCH)), 14)
    assert "the same samples with other values" in capfd.readouterr().err


def test_batches_that_are_iterators_are_known_by_their_samples(tmp_path: Path) -> None:
    for shuffle in (False, True):
        folder = tmp_path / str(shuffle)
        train(folder, Task(DataLoader(NUMBERS, batch_sampler=OneShot(shuffle))), 8, leave_at=6)
        assert loop_ledger.check(folder).num_samples == 5 * 6  # up to the last save
        with (
            pytest.raises(OtherDataError, match="contain different samples")
            if shuffle
            else contextlib.nullcontext()
        ):
            train(folder, Task(DataLoader(NUMBERS, batch_sampler=OneShot(shuffle))), 8)


def test_a_fork_over_other_data_reports_it_and_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from surefoot.train.resume.start import Start

    train(tmp_path / "parent", Task(DataLoader(NUMBERS, BATCH, sampler=Changing())), 7)
    task = Task(DataLoader(NUMBERS, BATCH, sampler=Changing()))
    with Run(
        spec_for(10),
        task,
        folder=tmp_path / "fork",
        quiet=True,
        start=Start(tmp_path / "parent", 7),
    ) as run:
        for _ in run.steps():
            pass
    assert len(task.seen) == 3
    assert (
        "contain different samples than those that the run was trained on" in capfd.readouterr().err
    )
    assert [
        event.fault for event in events.read(tmp_path / "fork") if isinstance(event, events.Fault)
    ] == ["other-data"]


KEYS: dict[str, Callable[[], Any]] = {
    "rows of an array": lambda: [np.array([[0, 1], [2, 3]]), np.array([[4, 5]])],
    "rows of a tensor": lambda: [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5]])],
    "floats": lambda: [[0.5, 1.5], [2.5]],
    "texts": lambda: [["a", "b"], ["c"]],
}


@pytest.mark.quick("rows of an array", "texts")
@pytest.mark.parametrize("kind", KEYS)
def test_keys_that_are_no_sample_numbers_train_and_resume(kind: str, tmp_path: Path) -> None:
    class Keyed(Dataset[Any]):
        def __getitem__(self, key: Any) -> Any:
            return float(len(str(key)))

    def make() -> Any:
        return DataLoader(Keyed(), batch_sampler=KEYS[kind]())

    unbroken = train(tmp_path / "whole", Task(make()), 5, every=UNSAVED)
    assert resumed(tmp_path / "stopped", make, 5, 2) == unbroken
    assert loop_ledger.check(tmp_path / "stopped").num_samples == 0


def test_samples_one_by_one_are_trained_on(tmp_path: Path) -> None:
    rows: Any = [torch.tensor(1.0), torch.tensor(2.0)]
    losses = train(tmp_path / "run", Task(DataLoader(rows, batch_size=None)), 4, every=UNSAVED)
    assert len(losses) == 4
