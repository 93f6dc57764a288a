"""Data that draw from the global random streams in mid-epoch, which the loop moves in between.

A loop that was left goes on with the batches of one that never was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import surefoot
from surefoot.train.attach import read_states
from tests.train.small import records

PASSES, SAMPLES, BATCH, SIZE = 2, 40, 4, 6


class Left(Exception):
    """As a kill: nothing is saved on the way out."""


class Buffered(IterableDataset[Any]):
    """A shuffle buffer that draws from a global stream."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        held: list[int] = []
        for number in range(SAMPLES):
            held.append(number)
            if len(held) > SIZE:
                yield held.pop(self._draw(len(held)))
        while held:
            yield held.pop(self._draw(len(held)))


class Chained:
    """Two loaders, one after the other: the second one draws its seed in mid-epoch."""

    def __init__(self) -> None:
        halves = torch.arange(SAMPLES).chunk(2)
        self._loaders = [DataLoader(TensorDataset(half), BATCH, shuffle=True) for half in halves]

    def __iter__(self) -> Iterator[Any]:
        for loader in self._loaders:
            for (batch,) in loader:
                yield batch


class Episodes:
    """A batch sampler that draws each batch when it is asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(SAMPLES // BATCH):
            yield torch.randperm(SAMPLES)[:BATCH].tolist()

    def __len__(self) -> int:
        return SAMPLES // BATCH


class InTurn:
    """Two lists in a random order."""

    def __iter__(self) -> Iterator[Any]:
        parts = [list(half.view(-1, BATCH)) for half in torch.arange(SAMPLES).chunk(2)]
        while any(parts):
            part = parts[random.randrange(2)]
            if part:
                yield part.pop()


DATA: dict[str, Callable[[], Any]] = {
    "python": lambda: DataLoader(Buffered(random.randrange), BATCH),
    "numpy": lambda: DataLoader(Buffered(np.random.randint), BATCH),
    "torch": lambda: DataLoader(Buffered(lambda size: int(torch.randint(size, ()))), BATCH),
    "chained": Chained,
    "episodes": lambda: DataLoader(
        list(range(SAMPLES)),  # type: ignore[arg-type]
        batch_sampler=Episodes(),
    ),
    "in turn": InTurn,
}


def train(
    folder: Path, data: Any, leave_at: tuple[int, ...] = (), save: str | None = "2 steps"
) -> tuple[dict[int, list[int]], Any]:
    """The samples of each step, and the weights at the end, of a loop that draws in each step."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = surefoot.attach(model=model, optimizer=optimizer, data=data, folder=folder, save=save)
    read = {}
    for _ in range(run.first_pass, PASSES):
        for batch in run.batches():
            flip = 1 if random.random() + np.random.random() < 1 else -1  # noqa: NPY002
            loss = model(flip * batch.view(-1, 1) / SAMPLES).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step_done(loss)
            read[run.step] = batch.tolist()
            if run.step in leave_at:
                run.session.telling.close()
                return read, None
    run.close()
    return read, model.state_dict()


@pytest.mark.quick("python", "chained", "episodes")
@pytest.mark.parametrize("kind", DATA)
def test_data_that_draw_in_mid_epoch_are_repeated_with_the_draws_of_the_loop_in_between(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, weights = train(tmp_path / "whole", DATA[kind](), save=None)
    read: dict[int, list[int]] = {}
    for leave_at in ((7,), (9,), (17,)):
        read |= train(tmp_path / "left", DATA[kind](), leave_at)[0]
    ended, found = train(tmp_path / "left", DATA[kind]())
    assert {**read, **ended} == whole
    for name, value in weights.items():
        assert torch.equal(value, found[name]), name
    assert len([each for each in records(tmp_path / "left") if each.kind == "started"]) == 4
    printed = " ".join(capsys.readouterr().err.split())
    assert "read again" not in printed
    assert "different samples" not in printed


def test_states_beyond_the_limit_are_named_once_and_again_where_the_loop_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(read_states, "MAX_BYTES", 12_000)
    train(tmp_path, DATA["torch"](), (7,))
    words = "both draw from the same global random generator between batches"
    assert " ".join(capsys.readouterr().err.split()).count(words) == 1
    train(tmp_path, DATA["torch"](), (9,))
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", ["shuffled", "alone"])
def test_nothing_is_kept_where_the_order_follows_from_the_start_of_the_epoch(
    kind: str, tmp_path: Path
) -> None:
    model = nn.Linear(1, 1)
    data: Any = (
        DataLoader(torch.arange(40.0).view(-1, 1), BATCH, shuffle=True)  # type: ignore[arg-type]
        if kind == "shuffled"
        else [torch.rand(4, 1) for _ in range(10)]
    )
    run = surefoot.attach(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=data,
        folder=tmp_path,
    )
    for batch in run.batches():
        torch.rand(3)
        run.step_done(model(batch).mean())
    assert run.session.keeper._stream_states.as_state()["streams"] == {}
    run.close()
