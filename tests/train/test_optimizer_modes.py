"""Optimizers with a training and an evaluation mode, and runs where gradients are disabled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot import Run
from surefoot.core.errors import InputError
from surefoot.train.run import drive
from tests.train.small import BATCH, SAMPLES, Small, records, spec

STEPS = 6
Groups = list[dict[str, Any]]


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: gradients at y, steps of z, and their mean x for evaluation."""

    def __init__(self, groups: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(groups, {"lr": lr, "beta": beta, "training": False, "k": 0})

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            for each in group["params"] if not group["training"] else ():
                if "z" in self.state[each]:
                    each.lerp_(self.state[each]["z"], 1 - group["beta"])
            group["training"] = True

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for each in group["params"] if group["training"] else ():
                if "z" in self.state[each]:
                    each.lerp_(self.state[each]["z"], 1 - 1 / group["beta"])
            group["training"] = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("Optimizer was not in train mode when step is called")
            group["k"] += 1
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.clone())
                each.lerp_(z, 1 / group["k"])
                each.sub_(each.grad, alpha=group["lr"] * (1 - group["beta"] * (1 - 1 / group["k"])))
                z.sub_(each.grad, alpha=group["lr"])


class Flagged(torch.optim.SGD):
    """The mode is an attribute, which its state does not contain."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def eval(self) -> None:
        self.is_training = False

    def step(self, closure: Any = None) -> Any:
        assert self.is_training
        return super().step(closure)


class Modal(Small):
    """Without augmentation; the optimizer of the last model is at `made`."""

    augment = None  # type: ignore[assignment]

    def __init__(self, kind: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind
        self.made: Any = None

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        self.made = self.kind([{"params": each["params"]} for each in groups], lr=0.1)
        return self.made


def modal_spec(**tables: Any) -> Any:
    return spec(STEPS, data={"shuffle": False}, schedule={"name": "constant"}, **tables)


def plain_loop(task: Modal) -> tuple[dict[str, Tensor], float]:
    """The weights of the training mode, and the loss of the weights of the evaluation mode."""
    torch.manual_seed(0)
    model, source = task.model(), task.data("train")
    optimizer: Any = task.kind(model.parameters(), lr=0.1)
    optimizer.train()
    for step in range(STEPS):
        batch = source.read(np.arange(BATCH) + step * BATCH)
        optimizer.zero_grad()
        (term,) = task.loss(model(batch[0]), batch).terms
        (term.total / term.count).backward()
        optimizer.step()
    weights = {name: each.detach().clone() for name, each in model.state_dict().items()}
    optimizer.eval()
    test = task.data("test").read(np.arange(SAMPLES))
    with torch.no_grad():
        (term,) = task.loss(model(test[0]), test).terms
    return weights, float(term.total) / float(term.count)


@pytest.mark.parametrize("kind", [ScheduleFree, Flagged])
def test_an_optimizer_with_modes_trains_as_in_a_plain_loop(kind: Any, tmp_path: Path) -> None:
    task = Modal(kind)
    weights, loss = plain_loop(task)
    with Run(modal_spec(train={"batch": BATCH}), task, folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            pass
        for name, weight in run.model.state_dict().items():
            torch.testing.assert_close(weight, weights[name])
        task.made.eval()
        assert run.evaluate().loss == pytest.approx(loss, rel=1e-5)
        task.made.train()
    assert any("has train() and eval()" in str(each) for each in records(tmp_path / "run"))


@pytest.mark.parametrize("kind", [ScheduleFree, Flagged])
def test_a_resumed_run_has_the_weights_of_an_unbroken_one(kind: Any, tmp_path: Path) -> None:
    given = modal_spec(checkpoint={"every": "2 steps"})
    found = []
    for name in ("whole", "broken"):
        for stop in (3, STEPS) if name == "broken" else (STEPS,):
            with Run(given, Modal(kind), folder=tmp_path / name, quiet=True) as run:
                for report in run.steps():
                    if report.step == stop < STEPS:
                        break
                weights = {key: each.clone() for key, each in run.model.state_dict().items()}
        found.append(weights)
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_an_ordinary_optimizer_has_no_note(tmp_path: Path) -> None:
    task = Modal(torch.optim.SGD)
    with Run(modal_spec(), task, folder=tmp_path / "run", quiet=True) as run:
        drive(run)
    assert not any("has train() and eval()" in str(each) for each in records(tmp_path / "run"))


def enter(folder: Path) -> None:
    with Run(spec(2), Small(), folder=folder, quiet=True):
        pass


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_run_without_gradients_is_refused_before_its_first_step(
    context: Callable[[], AbstractContextManager[Any]], tmp_path: Path
) -> None:
    with context(), pytest.raises(InputError, match="gradients are disabled") as caught:
        enter(tmp_path / "run")
    assert "torch.enable_grad()" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


def test_a_run_without_gradients_is_refused_after_set_grad_enabled(tmp_path: Path) -> None:
    torch.set_grad_enabled(False)
    try:
        with pytest.raises(InputError, match="set_grad_enabled"):
            enter(tmp_path / "run")
    finally:
        torch.set_grad_enabled(True)


def test_a_run_where_gradients_are_enabled_again_trains(tmp_path: Path) -> None:
    with (
        torch.no_grad(),
        torch.enable_grad(),
        Run(spec(2), Small(), folder=tmp_path / "run", quiet=True) as run,
    ):
        drive(run)
        assert run.step == 2
