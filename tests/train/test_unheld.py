"""State that can be seen and that no checkpoint holds is reported at the start.

The report has the word that holds it; what is held is not reported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    LambdaLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel

import surefoot
from surefoot.contract.events import Started
from surefoot.train.attach import AttachedLoop
from tests.train.small import Small, records, spec
from tests.train.test_resume import train


class Curriculum:
    """An object of the user's own that saves its state."""

    def __init__(self) -> None:
        self.level = 1

    def state_dict(self) -> dict[str, int]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.level = state["level"]


class Wrapped(Curriculum):
    """Refers to the optimizer as schedulers do that are not torch's."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer


def sequence(optimizer: Any) -> SequentialLR:
    return SequentialLR(optimizer, [ConstantLR(optimizer), StepLR(optimizer, 3)], milestones=[2])


MADE: dict[str, Callable[[nn.Module, Any], Any]] = {
    "StepLR": lambda model, optimizer: StepLR(optimizer, 3),
    "ReduceLROnPlateau": lambda model, optimizer: ReduceLROnPlateau(optimizer),
    "SequentialLR": lambda model, optimizer: sequence(optimizer),
    "ChainedScheduler": lambda model, optimizer: ChainedScheduler(
        [ConstantLR(optimizer), StepLR(optimizer, 3)], optimizer
    ),
    "Wrapped": lambda model, optimizer: Wrapped(optimizer),
    "Curriculum": lambda model, optimizer: Curriculum(),
    "GradScaler": lambda model, optimizer: GradScaler("cpu"),
    "AveragedModel": lambda model, optimizer: AveragedModel(model),
    "Linear": lambda model, optimizer: copy.deepcopy(model),
}
ROWS = list(torch.ones(3, 2, 4))


def step(run: AttachedLoop, model: nn.Module, optimizer: Any) -> None:
    for batch in run.batches():
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step_done(loss)
    run.close()


def reported(folder: Path) -> list[str]:
    started = next(event for event in records(folder) if isinstance(event, Started))
    return [note for note in started.notes if "no checkpoint holds" in note]


@pytest.mark.quick("ReduceLROnPlateau", "Curriculum", "GradScaler", "AveragedModel")
@pytest.mark.parametrize("kind", MADE)
def test_what_a_loop_moves_and_does_not_name_is_reported_once_and_the_word_to_name_it_works(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = MADE[kind](model, optimizer)
    assert mine is not None
    step(
        surefoot.attach(model=model, optimizer=optimizer, data=ROWS, folder=tmp_path / "a"),
        model,
        optimizer,
    )
    (line,) = reported(tmp_path / "a")
    assert f"mine ({kind})" in line
    word = "state={'mine': mine}"
    assert word in line
    assert word in " ".join(capsys.readouterr().err.split())
    run = surefoot.attach(
        model=model, optimizer=optimizer, data=ROWS, folder=tmp_path / "b", **eval(f"dict({word})")
    )
    step(run, model, optimizer)
    assert reported(tmp_path / "b") == []


def test_a_second_optimizer_is_reported_and_the_model_of_one_that_is_named_is_saved(
    tmp_path: Path,
) -> None:
    model, critic = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(critic.parameters(), lr=0.1)
    scheduler = StepLR(other, 3)
    run = surefoot.attach(
        model=model,
        optimizer=optimizer,
        data=ROWS,
        folder=tmp_path / "a",
        state={"scheduler": scheduler},
    )
    step(run, model, optimizer)
    (line,) = reported(tmp_path / "a")
    assert "other (SGD)" in line
    assert "optimizer=[..., other]" in line
    run = surefoot.attach(
        model=model,
        optimizer=[optimizer, other],
        data=ROWS,
        folder=tmp_path / "b",
        state={"scheduler": scheduler},
    )
    step(run, model, optimizer)
    assert reported(tmp_path / "b") == []
    started = next(event for event in records(tmp_path / "b") if isinstance(event, Started))
    assert any(
        "critic (Sequential)" in note and "checkpoints also hold these parameters" in note
        for note in started.notes
    )


class Script:
    """A loop in a class, whose scheduler is an attribute of it."""

    def __init__(self, folder: Path) -> None:
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = LambdaLR(self.optimizer, lambda epoch: 0.9**epoch)
        step(
            surefoot.attach(model=self.model, optimizer=self.optimizer, data=ROWS, folder=folder),
            self.model,
            self.optimizer,
        )


def test_a_scheduler_that_is_an_attribute_is_named_by_it(tmp_path: Path) -> None:
    Script(tmp_path / "a")
    (line,) = reported(tmp_path / "a")
    assert "state={'scheduler': self.scheduler}" in line


def test_a_scheduler_that_another_function_holds_or_that_is_made_later_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = {"hidden": [StepLR(optimizer, 3)]}
    run = surefoot.attach(model=model, optimizer=optimizer, data=ROWS, folder=tmp_path / "a")
    assert "StepLR" in " ".join(reported(tmp_path / "a"))
    held["later"] = [LambdaLR(optimizer, lambda epoch: 1.0)]  # type: ignore[list-item]
    capsys.readouterr()
    step(run, model, optimizer)
    printed = capsys.readouterr().err
    assert "LambdaLR" in printed
    assert "StepLR" not in printed


def test_what_holds_no_state_of_a_loop_is_not_reported(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion, teacher = (
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        nn.Sequential(nn.Linear(4, 3)).requires_grad_(False),
    )
    wrapped, part, scaler = nn.Sequential(model), model.weight, GradScaler("cpu", enabled=False)
    loader = torch.utils.data.DataLoader(torch.ones(4, 4), 2)  # type: ignore[arg-type]
    others = torch.optim.SGD([torch.ones(1)], lr=1.0)
    StepLR(others, 3)
    del others
    assert None not in (criterion, teacher, wrapped, part, scaler)
    step(
        surefoot.attach(model=model, optimizer=optimizer, data=loader, folder=tmp_path / "a"),
        model,
        optimizer,
    )
    assert reported(tmp_path / "a") == []


class Owner(Small):
    """A task that keeps an object, and names it in `state()` or not."""

    def __init__(self, made: Callable[[nn.Module, Any], Any], *, named: bool = False) -> None:
        super().__init__()
        self.criterion, self.net = nn.CrossEntropyLoss(), super().model()
        model = nn.Linear(4, 3)
        self.mine = made(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if named:
            self.state = lambda: {"mine": self.mine}

    def model(self) -> nn.Module:
        return self.net


@pytest.mark.quick("StepLR", "SequentialLR", "ChainedScheduler", "Wrapped", "Linear")
@pytest.mark.parametrize("kind", MADE)
def test_an_object_of_the_task_that_its_state_does_not_name_is_reported(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a", spec(2), Owner(MADE[kind]))
    (line,) = reported(tmp_path / "a")
    assert f"self.mine ({kind})" in line
    assert "{'mine': self.mine}" in " ".join(capsys.readouterr().err.split())
    train(tmp_path / "b", spec(2), Owner(MADE[kind], named=True))
    assert reported(tmp_path / "b") == []


def unfreeze(model: nn.Sequential, optimizer: Any) -> None:
    model[0].requires_grad_(True)


def unfreeze_and_name(model: nn.Sequential, optimizer: Any) -> None:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})


def add(model: nn.Sequential, optimizer: Any) -> None:
    model.add_module("late", nn.Linear(3, 3))


def freeze_and_unfreeze(model: nn.Sequential, optimizer: Any) -> None:
    for takes_gradients in (False, True):
        model[1].requires_grad_(takes_gradients)


def leave(model: nn.Sequential, optimizer: Any) -> None: ...


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (unfreeze, "0.weight, 0.bias"),
        (add, "late.weight, late.bias"),
        (unfreeze_and_name, ""),
        (freeze_and_unfreeze, ""),
        (leave, ""),
    ],
)
def test_a_loop_that_unfreezes_parameters_for_no_optimizer_is_told_once(
    change: Callable[[nn.Sequential, Any], None],
    names: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    run = surefoot.attach(
        model=model, optimizer=optimizer, data=ROWS, folder=tmp_path / "a", every=1, save=None
    )
    for number, batch in enumerate(run.batches()):
        if number == 1:
            change(model, optimizer)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step_done(loss)
    run.close()
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("no optimizer of attach") == bool(names)
    assert names in said
    assert ("add_param_group" in said) == bool(names)
