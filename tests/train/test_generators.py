"""Random generators besides the global ones resume where they were, or a message names the fix."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import surefoot
from surefoot.contract.task import Loss
from surefoot.core.errors import RunFolderError
from tests.train.small import Small, faults_of, spec
from tests.train.test_resume import train

MADE: dict[str, Callable[[], Any]] = {
    "numpy": np.random.default_rng,
    "MT19937": lambda: np.random.Generator(np.random.MT19937()),
    "RandomState": np.random.RandomState,
    "Python": random.Random,
    "torch": lambda: torch.Generator().manual_seed(int(np.random.default_rng().integers(1 << 30))),
}


def draw(generator: Any) -> float:
    return (
        float(torch.rand((), generator=generator))
        if isinstance(generator, torch.Generator)
        else generator.random()
    )


class Noisy(Dataset[torch.Tensor]):
    """Rows with noise from a generator that is an attribute."""

    def __init__(self, generator: Any) -> None:
        self.generator_of_noise = generator

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((4,), number + draw(self.generator_of_noise))


class Plain(Noisy):
    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((4,), float(number))


class WithNoise(nn.Linear):
    """A layer with a generator of its own."""

    def __init__(self, generator: Any) -> None:
        super().__init__(4, 3)
        self.generator = generator

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + draw(self.generator)


def loop(folder: Path, generator: Any, where: str, until: int = 99) -> list[float]:
    """Train two epochs of five batches, the generator drawn from in one place.

    Leave after `until` steps, as by a kill.
    """
    torch.manual_seed(0)
    model = nn.Sequential(WithNoise(generator) if where == "model" else nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = Subset(Noisy(generator), range(20)) if where == "dataset" else Plain(None)
    loader = DataLoader(
        dataset, 4, shuffle=True, collate_fn=Collated(generator) if where == "collate_fn" else None
    )
    state = {"mine": generator} if where == "state" else None
    run = surefoot.attach(
        model=model,
        optimizer=optimizer,
        data=loader,
        folder=folder,
        save="3 steps",
        every=1,
        state=state,
    )
    losses = []
    for _ in range(run.first_pass, 2):
        for batch in run.batches():
            loss = model(batch).square().mean() + (
                draw(generator) if where in ("state", "loop") else 0
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step_done(loss)
            losses.append(float(loss.detach()))
            if run.step == until:
                run.session.lock.release()
                return losses
    run.close()
    return losses


class Collated:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows) + draw(self.generator)


@pytest.mark.quick("state-MT19937", "dataset-numpy", "collate_fn-Python", "model-torch")
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("where", ["state", "dataset", "collate_fn", "model"])
def test_a_loop_resumes_with_the_draws_of_a_generator(
    where: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = MADE[kind]()
    whole = loop(tmp_path / "a", first, where, until=8)
    again = loop(tmp_path / "a", MADE[kind](), where)
    assert len(again) == 4  # steps 7 to 10
    assert again[:2] == whole[6:8]
    assert "draws from" not in capsys.readouterr().err
    assert not faults_of(tmp_path / "a")


@pytest.mark.quick("Python")
@pytest.mark.parametrize("kind", MADE)
def test_a_generator_that_the_loop_draws_from_and_does_not_name_is_reported_once(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator, idle = MADE[kind](), MADE[kind]()
    assert draw(idle) >= 0  # it made the data
    loop(tmp_path / "a", generator, "loop")
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.count("state={'generator': generator}") == 1
    assert "idle" not in printed


def test_the_state_of_another_kind_of_generator_is_refused(tmp_path: Path) -> None:
    loop(tmp_path / "a", np.random.default_rng(), "state", until=4)
    with pytest.raises(RunFolderError, match="RandomState"):
        loop(tmp_path / "a", np.random.RandomState(), "state")


def test_state_takes_an_array_that_the_loop_changes_in_place(tmp_path: Path) -> None:
    model, seen = nn.Linear(4, 3), np.zeros(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for start in (0, 3):
        run = surefoot.attach(
            model=model,
            optimizer=optimizer,
            data=[torch.ones(4)] * 3,
            folder=tmp_path,
            state={"seen": seen},
        )
        assert seen.tolist() == [start, 0]
        for batch in run.batches():
            seen[0] += 1
            run.step_done(model(batch).sum())
        run.close()
        seen = np.zeros(2)


class Drawing(Small):
    """A task whose loss draws from a generator, which `state()` names or not."""

    def __init__(self, generator: Any, *, named: bool) -> None:
        super().__init__()
        self.rng, self.unused = generator, np.random.default_rng()
        if named:
            self.state = lambda: {"rng": self.rng}

    def loss(self, output: torch.Tensor, batch: Any) -> Loss:
        self.noise = draw(self.rng)
        return super().loss(output, batch)


@pytest.mark.quick("RandomState", "torch")
@pytest.mark.parametrize("kind", MADE)
def test_a_generator_of_the_task_that_its_state_does_not_name_is_reported(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a", spec(2), Drawing(MADE[kind](), named=False))
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.count("return it from the task's state(): {'rng': self.rng}") == 1
    assert "unused" not in printed
    train(tmp_path / "b", spec(2), Drawing(MADE[kind](), named=True))
    assert "self.rng" not in capsys.readouterr().err
