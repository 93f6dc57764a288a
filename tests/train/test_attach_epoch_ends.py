"""Saves at the end of an epoch, in an attached loop.

They resume where a plain loop goes on: after its last batch, after `break`, after the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import surefoot
from surefoot.contract.events import Committed
from tests.train.small import records

BATCHES, EPOCHS = 4, 4
INPUTS = torch.randn(4 * BATCHES, 3, generator=torch.Generator().manual_seed(0))
LABELS = INPUTS[:, :2].argmax(1)


class Killed(Exception):
    """A kill, which nothing of the loop survives."""


class Stream(IterableDataset[Any]):
    """The rows one after the other; without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(INPUTS, LABELS, strict=True)


def shuffled() -> Any:
    return DataLoader(TensorDataset(INPUTS, LABELS), 4, shuffle=True)


DATA: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "workers": lambda: DataLoader(
        TensorDataset(INPUTS, LABELS), 4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "list": lambda: [(INPUTS[n::BATCHES], LABELS[n::BATCHES]) for n in range(BATCHES)],
    "without a length": lambda: DataLoader(Stream(), 4),
}


class Loop:
    """A loop as people write it: what follows the batches of an epoch needs one of them.

    `killed_at` says where in which epoch it is killed: "batch", "validation" or "start".
    """

    def __init__(self, folder: Path, data: Any, *, save: str | None, limit: int | None = None):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.limit, self.told = limit, list[float]()
        self.run = surefoot.attach(
            model=self.model,
            optimizer=self.optimizer,
            data=data,
            folder=folder,
            save=save,
            state={"schedule": self.schedule},
        )

    def train(
        self, epochs: int = EPOCHS, *, killed_at: tuple[str, int] = ("", 0), saves: bool = False
    ) -> None:
        run = self.run
        for epoch in range(run.first_pass, epochs):
            for number, (inputs, labels) in enumerate(run.batches(), run.first_batch):
                loss = F.cross_entropy(self.model(inputs), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                run.step_done(loss)
                self.kill(killed_at == ("batch", epoch) and number == 1)
                if number + 1 == self.limit:
                    break
            self.kill(killed_at == ("validation", epoch))
            self.told.append(loss.item())  # fails after an epoch without a batch
            self.schedule.step()
            if saves:
                run.save()
            self.kill(killed_at == ("start", epoch))

    def kill(self, is_now: bool) -> None:
        if is_now:
            self.run.session.lock.release()
            raise Killed

    def end(self) -> tuple[int, list[float]]:
        self.run.close()
        return self.run.step, self.model.weight.flatten().tolist()


def lead(folder: Path, data: Any, save: str | None, **others: Any) -> tuple[int, list[float]]:
    loop = Loop(folder, data, save=save, limit=others.pop("limit", None))
    loop.train(**others)
    return loop.end()


@pytest.mark.parametrize("place", ["validation", "start", "batch"])
@pytest.mark.parametrize("save", [f"{BATCHES} steps", "2 steps", "0.000001 s"])
@pytest.mark.quick("4 steps-validation", "0.000001 s-start")
def test_a_loop_killed_after_an_epoch_resumes_with_a_batch(
    save: str, place: str, tmp_path: Path
) -> None:
    whole = lead(tmp_path / "whole", shuffled(), None)
    with pytest.raises(Killed):
        lead(tmp_path / "a", shuffled(), save, killed_at=(place, 1))
    assert lead(tmp_path / "a", shuffled(), save) == whole


@pytest.mark.parametrize("kind", DATA)
def test_each_epoch_can_be_killed_in_its_validation(kind: str, tmp_path: Path) -> None:
    whole = lead(tmp_path / "whole", DATA[kind](), None)
    for epoch in range(1, EPOCHS):
        with pytest.raises(Killed):
            lead(tmp_path / "a", DATA[kind](), "2 steps", killed_at=("start", epoch), saves=True)
    assert lead(tmp_path / "a", DATA[kind](), "2 steps") == whole


@pytest.mark.parametrize("save", [None, f"{BATCHES} steps", "3 steps"])
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.quick("shuffled-4 steps", "without a length-4 steps")
def test_a_finished_loop_trains_nothing_more(kind: str, save: str | None, tmp_path: Path) -> None:
    whole = lead(tmp_path / "a", DATA[kind](), save)
    loop = Loop(tmp_path / "a", DATA[kind](), save=save)
    assert loop.run.first_pass == EPOCHS
    loop.train()
    assert loop.end() == whole


@pytest.mark.parametrize("kind", DATA)
def test_an_epoch_left_by_break_has_ended_when_the_loop_saves(kind: str, tmp_path: Path) -> None:
    whole = lead(tmp_path / "whole", DATA[kind](), None, limit=3)
    with pytest.raises(Killed):
        lead(tmp_path / "a", DATA[kind](), None, limit=3, saves=True, killed_at=("start", 1))
    assert lead(tmp_path / "a", DATA[kind](), None, limit=3) == whole


def test_a_loop_of_epochs_left_by_break_is_extended_by_whole_ones(tmp_path: Path) -> None:
    whole = lead(tmp_path / "whole", shuffled(), None, limit=3)
    lead(tmp_path / "a", shuffled(), None, limit=3, epochs=2)
    assert lead(tmp_path / "a", shuffled(), None, limit=3) == whole


def test_what_is_saved_in_the_middle_before_break_continues_there(tmp_path: Path) -> None:
    whole = lead(tmp_path / "whole", shuffled(), None)
    with Loop(tmp_path / "a", shuffled(), save=None).run as run:
        for inputs, labels in run.batches():
            session = run.session
            loop_model, optimizer = session.keeper._objects["model"], session.optimizers
            loss = F.cross_entropy(loop_model(inputs), labels)
            optimizer[0].zero_grad()
            loss.backward()
            optimizer[0].step()
            run.step_done(loss)
            break  # the time is over: the block ends in the middle of an epoch
    assert lead(tmp_path / "a", shuffled(), None) == whole


@pytest.mark.parametrize("save", ["4 steps", "3 steps", None])
@pytest.mark.parametrize("by", ["save", "close", "with"])
@pytest.mark.quick("save-4 steps", "close-4 steps", "with-4 steps")
def test_what_changes_after_the_last_step_is_saved(
    by: str, save: str | None, tmp_path: Path
) -> None:
    loop = Loop(tmp_path / "a", shuffled(), save=save)
    loop.train(1)
    loop.model.weight.data.fill_(0.5)  # as of an average that is copied into the model
    if by == "with":
        with loop.run:
            pass
    else:
        getattr(loop.run, by)()
    other = nn.Linear(3, 2)
    surefoot.checkpoint.load_into(other, tmp_path / "a", "last")
    assert torch.equal(other.weight, loop.model.weight)


def test_a_finished_loop_that_is_started_again_writes_no_checkpoint(tmp_path: Path) -> None:
    for _ in range(3):
        lead(tmp_path / "a", shuffled(), f"{BATCHES} steps")
    saved = [each.step for each in records(tmp_path / "a") if isinstance(each, Committed)]
    assert saved == [*range(BATCHES, BATCHES * EPOCHS, BATCHES), BATCHES * EPOCHS]
