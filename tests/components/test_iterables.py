"""Iterables that can say where they are go on there; all others are read again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.iterated import KEPT_STATES, Iterated


class Stateful:
    """Batches drawn from a generator that goes on through epochs: only its state tells the next."""

    def __init__(self, length: int = 30) -> None:
        self.length, self.drawn, self.restored = length, 0, False
        self.generator = torch.Generator().manual_seed(0)
        self.begun = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        if not self.restored:
            self.begun = 0
        self.restored = False
        while self.begun < self.length:
            self.begun += 1
            self.drawn += 1
            yield torch.rand(4, 3, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, "generator": self.generator.get_state()}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.begun, self.restored = held["begun"], True
        self.generator.set_state(held["generator"])


def read(source: Iterated, *numbers: int) -> list[float]:
    return [float(source.read(np.array([number])).sum()) for number in numbers]


def test_an_iterable_with_a_state_goes_on_where_it_was_without_drawing_again() -> None:
    whole = read(Iterated(Stateful()), *range(30), *range(10))
    first = Iterated(Stateful())
    read(first, *range(30), *range(7))
    iterable = Stateful()
    other = Iterated(iterable)
    other.load_state_dict(first.state_dict())
    assert read(other, 7, 8, 9) == whole[37:40]  # of the second epoch, whose batches are others
    assert iterable.drawn == 3


def test_what_was_read_ahead_of_training_is_read_again_from_a_state_before_it() -> None:
    whole = read(Iterated(Stateful()), *range(30))
    ahead = Iterated(Stateful())
    read(ahead, *range(20))
    iterable = Stateful()
    other = Iterated(iterable)
    other.load_state_dict(ahead.state_dict())
    assert read(other, 12, 13) == whole[12:14]
    assert iterable.drawn == 2
    assert read(other, 29) == whole[29:]
    far = Iterated(Stateful())
    far.load_state_dict(ahead.state_dict())
    # before all of them: from the beginning
    assert read(far, 20 - KEPT_STATES - 2) == whole[20 - KEPT_STATES - 2 : 20 - KEPT_STATES - 1]


def test_a_step_back_in_one_process_gives_the_same_batch_and_a_new_epoch_begins_anew() -> None:
    source = Iterated(Stateful())
    assert read(source, 0, 1, 2, 3, 4) == [
        *(first := read(Iterated(Stateful()), 0, 1, 2)),
        *read(source, 3, 4),
    ]
    assert read(source, 2)[0] == first[2]
    plain = Iterated([torch.full((2,), float(number)) for number in range(5)])
    assert read(plain, 3, 1) == [6.0, 2.0]
    assert plain.state_dict()["states"] == []


class Task:
    """Trains on what only its iterable can tell, and names it in its state."""

    def __init__(self, iterable: Any) -> None:
        self.source = Iterated(iterable)

    def data(self, split: str) -> Any:
        return self.source if split == "train" else Iterated([torch.ones(4, 3)])

    def state(self) -> dict[str, Any]:
        return {"data": self.source}

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)

    def loss(self, output: Tensor, batch: Tensor) -> Loss:
        return Loss.sum(F.mse_loss(output[:, 0], batch.sum(1), reduction="sum"), count=len(output))


SPEC = RunSpec(
    train={"length": "12 steps"},
    optim={"lr": 0.1},
    checkpoint={"every": "2 steps"},
    observe={"tensorboard": False},
)


def losses_of(folder: Path, task: Task, leave_at: int | None = None) -> list[float]:
    losses = []
    with Run(SPEC, task, folder=folder, quiet=True) as run:
        for report in run.steps():
            losses.append(report.loss)
            if report.step == leave_at:
                raise RuntimeError("left")
    return losses


def goes_on(folder: Path, make: Any) -> int:
    """Left and resumed in a fresh iterable, the losses are those of an unbroken run.

    Gives how many steps were left.
    """
    unbroken = losses_of(folder / "unbroken", Task(make()))
    with pytest.raises(Exception, match="left"):
        losses_of(folder / "left", Task(make()), leave_at=7)
    gone_on = losses_of(folder / "left", Task(make()))
    assert gone_on == unbroken[-len(gone_on) :]
    return len(gone_on)


def test_a_run_goes_on_with_the_iterable_s_state_out_of_the_checkpoint(tmp_path: Path) -> None:
    made: list[Stateful] = []

    def make() -> Stateful:
        # its second epoch differs from its first: reading again would give other batches
        made.append(Stateful(5))
        return made[-1]

    left = goes_on(tmp_path, make)
    assert 5 <= left <= 8
    assert made[-1].drawn == left + 1  # one before the commit was read, to try the task on


def test_a_loader_of_torchdata_goes_on_where_it_was(tmp_path: Path) -> None:
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="the package torchdata is not installed"
    )

    def make() -> Any:
        generator = torch.Generator().manual_seed(3)
        rows = torch.rand(20, 3, generator=torch.Generator().manual_seed(1))
        # the loader draws from its own generator, too
        sampler = loaders.sampler.RandomSampler(rows, generator=generator)
        return loaders.StatefulDataLoader(list(rows), batch_size=4, sampler=sampler)

    assert 5 <= goes_on(tmp_path, make) <= 8
