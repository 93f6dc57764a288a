"""State that a loop changes or makes after `attach` and that no checkpoint holds is reported."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import surefoot
from surefoot.train.record.noticed.unheld import SteppedOptimizers
from tests.train.small import Small, records, spec
from tests.train.test_resume import train
from tests.train.test_unheld import reported

ROWS = list(torch.ones(9, 2, 4))


class Sam(torch.optim.Optimizer):
    """Has an optimizer inside, whose state its own state_dict does not contain."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class SavesBase(Sam):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.base.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.base.load_state_dict(state["base"])
        self.base.param_groups = self.param_groups


class ForgetsBase(Sam):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


def train_sam(kind: type[Sam], folder: Path, num_steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters())
    scheduler = StepLR(optimizer, 2, 0.5)
    with surefoot.attach(
        model=model,
        optimizer=optimizer,
        data=ROWS,
        folder=folder,
        state={"scheduler": scheduler},
        every=1,
    ) as run:
        for batch in run.batches():
            optimizer.zero_grad()
            loss = (model(batch) - 1).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.step_done(loss)
            if run.step == num_steps:
                run.save()
                break
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize(("kind", "is_named"), [(Sam, 0), (SavesBase, 0), (ForgetsBase, 1)])
def test_the_state_of_an_optimizer_inside_an_optimizer_is_saved_or_named(
    kind: type[Sam], is_named: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train_sam(kind, tmp_path / "whole", 8)
    printed = capsys.readouterr().err
    assert printed.count("base of the optimizer") == is_named
    assert printed.count("return the state_dict() of that optimizer") == is_named
    train_sam(kind, tmp_path / "twice", 4)
    resumed = train_sam(kind, tmp_path / "twice", 8)
    if not is_named:
        assert all(map(torch.equal, whole, resumed))


@pytest.mark.parametrize(("kind", "is_named"), [(Sam, 1), (SavesBase, 0)])
def test_a_run_names_an_optimizer_inside_an_optimizer_that_no_checkpoint_holds(
    kind: type[Sam], is_named: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Small()
    task.optimizer = kind  # type: ignore[attr-defined]
    train(tmp_path / "a", spec(3), task)
    told = [
        each for each in records(tmp_path / "a") if "base of the" in getattr(each, "detail", "")
    ]
    assert len(told) == is_named


class Agent:
    """Keeps a network in a dict."""

    def __init__(self, net: nn.Module) -> None:
        self.nets = {"target": net}


def follow(model: nn.Module, mine: Any, state: dict[str, Any], folder: Path, change: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = surefoot.attach(
        model=model, optimizer=optimizer, data=ROWS, folder=folder, save="3 steps", state=state
    )
    for batch in run.batches():
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        change(model, mine)
        run.step_done(loss)
    run.close()


def find_net(mine: Any) -> nn.Module:
    mine = getattr(mine, "nets", mine)
    found: nn.Module = next(iter(mine.values())) if type(mine) is dict else mine
    return found[0] if isinstance(found, list) else found


@torch.no_grad()
def average(model: nn.Module, mine: Any) -> None:
    for target, each in zip(find_net(mine).parameters(), model[0].parameters(), strict=True):
        target.data.mul_(0.9).add_(each.data, alpha=0.1)


def use(model: nn.Module, mine: Any) -> None:
    find_net(mine)(torch.ones(4))


def evaluate(model: nn.Module, mine: Any) -> None:
    copy.deepcopy(model[0]).eval()(torch.ones(4))


MADE: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "mine": (lambda net: net, "mine (Linear)"),
    "another class": (nn.Sequential, "mine (Sequential)"),
    "in a dict": (lambda net: {"t": net}, "mine['t'] (Linear)"),
    "in an object": (Agent, "mine.nets['target'] (Linear)"),
}


@pytest.mark.quick("mine", "in an object")
@pytest.mark.parametrize("kind", MADE)
def test_a_network_that_the_loop_changes_is_named_at_a_checkpoint_after_it_has_changed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = MADE[kind]
    model = nn.Sequential(nn.Linear(4, 80), nn.Linear(80, 3))
    mine = make(copy.deepcopy(model[0]).requires_grad_(False))
    follow(model, mine, {}, tmp_path / "a", average)
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.count("no checkpoint holds the state") == 1
    assert words in printed
    follow(model, mine, {}, tmp_path / "b", use)
    follow(model, mine, {}, tmp_path / "c", evaluate)
    follow(model, mine, {"mine": find_net(mine)}, tmp_path / "d", average)
    assert "no checkpoint holds" not in capsys.readouterr().err


@pytest.mark.quick("SGD-0", "Adam-5")
@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("first", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_that_replaces_one_of_attach_is_named_once(
    first: Any, at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 3)
    optimizer = first(model.parameters(), lr=0.1)
    run = surefoot.attach(
        model=model, optimizer=optimizer, data=ROWS, folder=tmp_path / "a", save="2 steps"
    )
    for number, batch in enumerate(run.batches()):
        if number == at:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step_done(loss)
    run.close()
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.count("no checkpoint holds the state of an optimizer (Adam)") == 1


@pytest.mark.quick("1", "11")
@pytest.mark.parametrize("at", [1, 5, 11])
def test_a_second_optimizer_that_trains_the_model_is_named_at_the_next_checkpoint(
    at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizers = nn.Linear(4, 3), list[torch.optim.Optimizer]()
    other = nn.Linear(4, 3)
    optimizers += [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, other)]
    run = surefoot.attach(
        model=model, optimizer=optimizers[0], data=ROWS * 2, folder=tmp_path / "a", save="1 steps"
    )
    for number, batch in enumerate(run.batches()):
        if number == at:
            optimizers.append(torch.optim.AdamW([model.weight], lr=0.1))
        loss = (model(batch) + other(batch)).square().mean()
        model.zero_grad()
        other.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        run.step_done(loss)
        # the loop asks for the next batch, and so saves, before the line is read
        named = "state of an optimizer (AdamW)" in " ".join(capsys.readouterr().err.split())
        assert named == (number == at + 1)
    run.close()
    assert "state of an optimizer (Adam)" not in capsys.readouterr().err


def test_the_hook_on_steps_ends_with_the_object_that_set_it() -> None:
    def step() -> torch.optim.Optimizer:
        made = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        made.step()
        return made

    before = weakref.ref(step())  # nothing holds it, and nothing records it
    stepped = SteppedOptimizers()
    first = step()
    assert before() is None
    assert stepped.take() == [first]
    assert stepped.take() == []
    first.step()
    step()  # one that does not live
    assert stepped.take() == [first]
    found = stepped._found
    del stepped
    first.step()
    assert not found


def test_optimizers_that_an_earlier_loop_left_or_that_attach_was_given_are_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    kept = []
    for number in range(2):
        both = [torch.optim.Adam(each.parameters(), lr=0.1) for each in model]
        kept.append([both])
        run = surefoot.attach(
            model=model, optimizer=both, data=ROWS, folder=tmp_path / f"{number}", save="2 steps"
        )
        for index, batch in enumerate(run.batches()):
            loss = model(batch).square().mean()
            loss.backward()
            both[index % 2].step()
            run.step_done(loss)
        run.close()
    assert "no checkpoint holds" not in capsys.readouterr().err


def test_a_scheduler_that_is_made_after_the_first_checkpoint_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = surefoot.attach(
        model=model, optimizer=optimizer, data=ROWS, folder=tmp_path / "a", save="2 steps"
    )
    made: list[StepLR] = []
    for number, batch in enumerate(run.batches()):
        if number == 4:
            made.append(StepLR(optimizer, 2))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for each in made:
            each.step()
        run.step_done(loss)
    run.close()
    assert " ".join(capsys.readouterr().err.split()).count("(StepLR)") == 1


class NetInDict(Small):
    """A task that keeps a network in a dict."""

    def __init__(self, make: Callable[[nn.Module], Any], *, named: bool = False) -> None:
        super().__init__()
        self.nets = make(nn.Linear(4, 3))
        if named:
            self.state = lambda: {"net": find_net(self.nets)}


@pytest.mark.parametrize("make", [lambda net: {"t": net}, lambda net: {"t": [net]}])
def test_a_network_in_a_dict_of_the_task_is_reported(make: Any, tmp_path: Path) -> None:
    train(tmp_path / "a", spec(2), NetInDict(make))
    (line,) = reported(tmp_path / "a")
    assert "self.nets['t']" in line
    train(tmp_path / "b", spec(2), NetInDict(make, named=True))
    assert reported(tmp_path / "b") == []
