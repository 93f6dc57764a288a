"""A resume names the settings of objects in `state` that the script has changed since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import surefoot
from surefoot.contract.events import Started
from tests.train.small import records

Make = Callable[[torch.optim.Optimizer], Any]


class Average:
    """An average of a loss, with its decay and the time constant of a warm-up."""

    def __init__(self, decay: float, start: float = 0.0) -> None:
        self.decay, self.value, self.options = decay, start, {"warm": 10}

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.decay, "value": self.value, "options": dict(self.options)}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.decay, self.value = held["momentum"], held["value"]
        self.options = dict(held["options"])

    def step(self) -> None:
        self.value = self.decay * self.value + 1


def warmed(step_size: int) -> Make:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        first = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
        then = lr_scheduler.StepLR(optimizer, step_size)
        return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[2])

    return make


def scaler(interval: int) -> Make:
    return lambda _: torch.amp.GradScaler("cpu", growth_interval=interval)


def loop(folder: Path, make: Make, lr: float = 0.1, steps: int = 3) -> tuple[list[str], Any]:
    """Train some steps of an epoch; gives the notes on settings, and the object of `state`."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    it = make(optimizer)
    data = list(torch.ones(24, 2, 1))
    run = surefoot.attach(
        model=model, optimizer=optimizer, data=data, folder=folder, state={"it": it}
    )
    for number, x in enumerate(run.batches()):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        run.step_done(loss)
        if isinstance(it, lr_scheduler.ReduceLROnPlateau):
            it.step(float(loss.detach()))
        elif hasattr(it, "step") and not isinstance(it, torch.amp.GradScaler):
            it.step()
        if number == steps - 1:
            break
    run.save()
    del run
    notes = [each for each in records(folder) if isinstance(each, Started)][-1].notes
    return [note for note in notes if "the script sets" in note], it


CHANGES: dict[str, tuple[Make, Make, str, str]] = {
    "a step size": (
        lambda o: lr_scheduler.StepLR(o, 5),
        lambda o: lr_scheduler.StepLR(o, 7),
        "it.step_size = 7, but the previous attempt had 5",
        "set it.step_size = 7 after attach",
    ),
    "a factor": (
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: lr_scheduler.ExponentialLR(o, 0.5),
        "it.gamma = 0.5, but the previous attempt had 0.9",
        "set it.gamma = 0.5 after attach",
    ),
    "milestones": (
        lambda o: lr_scheduler.MultiStepLR(o, [5, 9]),
        lambda o: lr_scheduler.MultiStepLR(o, [6, 9]),
        "it.milestones = Counter({6: 1, 9: 1})",
        "after attach",
    ),
    "a patience": (
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=5),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2),
        "it.patience = 2, but the previous attempt had 5",
        "set it.patience = 2 after attach",
    ),
    "a scheduler in a scheduler": (
        warmed(5),
        warmed(8),
        "it._schedulers[1].step_size = 8, but the previous attempt had 5",
        "set it._schedulers[1].step_size = 8 after attach",
    ),
    "the interval of a scaler": (
        scaler(2000),
        scaler(100),
        "it.state_dict()['growth_interval'] = 100, but the previous attempt had 2000",
        "it.load_state_dict(it.state_dict() | {'growth_interval': 100}) after attach",
    ),
    "the decay of an average": (
        lambda _: Average(0.9),
        lambda _: Average(0.99),
        "it.state_dict()['momentum'] = 0.99, but the previous attempt had 0.9",
        "it.load_state_dict(it.state_dict() | {'momentum': 0.99}) after attach",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_attach_names_what_the_script_changed_in_state(what: str, tmp_path: Path) -> None:
    first, second, named, remedy = CHANGES[what]
    assert loop(tmp_path, first)[0] == []
    told, it = loop(tmp_path, second)
    assert len(told) == 1
    assert named in told[0]
    assert remedy in told[0]
    call = told[0].partition("for the new value ")[2].removeprefix("set ").removeprefix("call ")
    namespace: dict[str, Any] = {"it": it, "Counter": __import__("collections").Counter}
    exec(call.removesuffix(" after attach"), namespace)
    wanted = second(torch.optim.SGD([torch.zeros(1)], 0.1)).state_dict()
    for key in ("step_size", "gamma", "milestones", "patience", "growth_interval", "momentum"):
        assert it.state_dict().get(key) == wanted.get(key)
    assert loop(tmp_path, second)[0] == []  # the attempt before had the same script


SAME: dict[str, tuple[Make, Make]] = {
    **{name: (change[0], change[0]) for name, change in CHANGES.items()},
    "a counter that starts elsewhere": (lambda _: Average(0.9, 0.0), lambda _: Average(0.9, 5.0)),
}


@pytest.mark.parametrize("what", SAME)
def test_attach_names_nothing_that_the_script_did_not_change(what: str, tmp_path: Path) -> None:
    first, second = SAME[what]
    assert [loop(tmp_path, make)[0] for make in (first, second, second)] == [[], [], []]


def test_a_changed_learning_rate_is_named_once_and_not_again_for_its_scheduler(
    tmp_path: Path,
) -> None:
    loop(tmp_path, lambda o: lr_scheduler.StepLR(o, 100))
    told, _ = loop(tmp_path, lambda o: lr_scheduler.StepLR(o, 100), lr=0.01)
    assert len(told) == 1
    assert "optimizer.param_groups[0]['lr'] = 0.01" in told[0]


WARM: dict[str, Make] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 4)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=2),
    "none": lambda o: lr_scheduler.StepLR(o, 9),
}


@pytest.mark.parametrize("kind", WARM)
def test_another_learning_rate_is_named_once_whatever_the_warm_up(
    kind: str, tmp_path: Path
) -> None:
    assert loop(tmp_path, WARM[kind])[0] == []
    assert loop(tmp_path, WARM[kind])[0] == []
    notes = [note for note in loop(tmp_path, WARM[kind], lr=0.2)[0] if "lr']" in note]
    # OneCycleLR replaces the learning rate of the optimizer
    assert len(notes) == (kind != "one cycle")
    assert all("lr'] = 0." in note and "base_lrs" in note for note in notes)


def test_the_settings_of_several_optimizers_are_named_as_they_were_given(tmp_path: Path) -> None:
    for attempt in range(2):
        layers = [torch.nn.Linear(1, 1) for _ in range(2)]
        pair = [
            torch.optim.SGD(each.parameters(), 0.1 + n * attempt) for n, each in enumerate(layers)
        ]
        with surefoot.attach(
            model=torch.nn.Sequential(*layers), optimizer=pair, data=[1, 2], folder=tmp_path
        ) as run:
            for _ in run.batches():
                run.step_done(1.0)
                break
    notes = [each for each in records(tmp_path) if isinstance(each, Started)][-1].notes
    assert any(
        "for the new value set optimizer[1].param_groups[0]['lr'] = 1.1" in each for each in notes
    )
