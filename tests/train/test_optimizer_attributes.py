"""Attributes of a user's optimizer that change and that no checkpoint holds are named.

What torch sets, what the state dict contains and what never changes is not.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

import surefoot
from surefoot.contract.events import Fault
from surefoot.train.run import Run
from tests.train.small import Small, records, spec

NOTICE = "no checkpoint holds it"


class Plain(torch.optim.SGD):
    """An SGD whose subclasses change something in each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.prepare()

    def prepare(self) -> None: ...

    def change(self) -> None: ...

    def step(self, closure: Any = None) -> Any:
        self.change()
        return super().step(closure)

    def first(self) -> torch.Tensor:
        found: torch.Tensor = self.param_groups[0]["params"][0]
        return found


class Calls(Plain):
    calls = 0

    def change(self) -> None:
        self.calls += 1


class Drift(Plain):
    def prepare(self) -> None:
        self.drift = torch.zeros(3)

    def change(self) -> None:
        self.drift.add_(0.5)


class Wide(Plain):
    def prepare(self) -> None:
        self.wide = torch.zeros(1 << 20, 2)

    def change(self) -> None:
        self.wide[0, 0] += 1


class Norms(Plain):
    def prepare(self) -> None:
        self.norms: deque[float] = deque(maxlen=4)

    def change(self) -> None:
        self.norms.append(float(self.first().detach().norm()))


class AtFirst(Plain):
    scale: Any = None

    def change(self) -> None:
        if self.scale is None:
            self.scale = {"first": self.first().detach().abs().sum()}


class Late(Plain):
    calls, worst = 0, 0.0

    def change(self) -> None:
        self.state["calls"] = self.state.get("calls", 0) + 1  # type: ignore[index, call-overload]
        if self.state["calls"] > 3:  # type: ignore[index]
            self.worst = 2.0


class Draws(Plain):
    def prepare(self) -> None:
        self.rng = random.Random(3)

    def change(self) -> None:
        self.param_groups[0]["lr"] = 0.01 * self.rng.random()


LOST: dict[str, tuple[type[Plain], str]] = {
    "number": (Calls, "calls"),
    "tensor": (Drift, "drift"),
    "large tensor": (Wide, "wide"),
    "floats": (Norms, "norms"),
    "from the first batch": (AtFirst, "scale"),
    "from step 4 on": (Late, "worst"),
    "generator": (Draws, "rng"),
}


class InState(Plain):
    calls = 0

    def change(self) -> None:
        self.calls += 1
        self.state["calls"] = self.calls  # type: ignore[index]


class InGroup(Plain):
    _calls = 0

    def change(self) -> None:
        self._calls += 1
        self.param_groups[0]["calls"] = self._calls


class InDict(Plain):
    calls = 0

    def change(self) -> None:
        self.calls += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": {"n": self.calls}}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["mine"]["n"]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


class Fixed(Plain):
    def prepare(self) -> None:
        self.table, self.bounds = torch.ones(4), [0.1, 0.2]

    def change(self) -> None:
        self.table = torch.ones(4)


class Listed(Plain):
    """Lists its parameters, and its state anew in each step."""

    def prepare(self) -> None:
        self.listed = [self.first()]

    def change(self) -> None:
        mean = self.state[self.first()].setdefault("mean", torch.zeros(2))
        mean += 1
        self.means = [mean]


KEPT: dict[str, Callable[[Any], Any]] = {
    "state": InState,
    "group": InGroup,
    "state_dict": InDict,
    "fixed": Fixed,
    "listed": Listed,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "Adam of one kernel": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "Lamb": lambda params: surefoot.optim.Lamb(params, lr=0.01),
    "Lars": lambda params: surefoot.optim.Lars(params, lr=0.01),
}


def follow(make: Callable[[Any], Any], folder: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = make(list(model.parameters()))
    rows = list(torch.ones(20, 2, 4))
    with surefoot.attach(
        model=model, optimizer=optimizer, data=rows, folder=folder, every=1
    ) as run:
        schedule: LRScheduler = StepLR(optimizer, 3)
        for batch in run.batches():
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            run.step_done(loss)


def told(text: str) -> list[str]:
    return [line for line in text.splitlines() if NOTICE in line]


@pytest.mark.parametrize("kind", LOST)
def test_an_attached_loop_names_an_attribute_that_is_lost_once(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make, name = LOST[kind]
    follow(make, tmp_path / "run")
    (line,) = told(capfd.readouterr().err)
    assert f"{name} of the optimizer ({make.__name__}) changes" in line
    assert "state_dict()" in line


@pytest.mark.parametrize("kind", KEPT)
def test_an_attached_loop_names_nothing_that_is_saved_or_fixed(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    follow(KEPT[kind], tmp_path / "run")
    assert told(capfd.readouterr().err) == []


class Given(Small):
    """A task with an optimizer of its own."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def optimizer(self, groups: Any) -> Any:
        return self.make(groups)


def faults(folder: Path) -> Sequence[Fault]:
    return [each for each in records(folder) if isinstance(each, Fault) and NOTICE in each.detail]


@pytest.mark.parametrize("kind", ["number", "tensor", "from step 4 on"])
def test_a_run_names_an_attribute_that_is_lost_once(kind: str, tmp_path: Path) -> None:
    make, name = LOST[kind]
    with Run(spec(10), Given(make), folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            pass
    (fault,) = faults(tmp_path / "run")
    assert fault.fault == "attributes"
    assert f"{name} of the optimizer ({make.__name__}) changes" in fault.detail


@pytest.mark.parametrize("kind", ["state", "fixed", "Adam"])
def test_a_run_names_nothing_that_is_saved_or_fixed(kind: str, tmp_path: Path) -> None:
    with Run(spec(10), Given(KEPT[kind]), folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            pass
    assert faults(tmp_path / "run") == []
