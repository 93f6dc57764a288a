"""Attributes of the task that change while it trains, compared with a plain PyTorch loop."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract import manifest
from surefoot.contract.events import Fault
from surefoot.contract.spec import RunSpec
from tests.train.small import records

STEPS, HALF, SIZE, LR = 6, 3, 4, 0.1


class Annealing:
    """A loss whose weight grows with the number of its calls."""

    def __init__(self) -> None:
        self.k = 0
        self.table = np.arange(20_000)  # data

    def model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randn(24, 4, generator=draw), torch.randint(0, 3, (24,), generator=draw)
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def next_weight(self, loss: Tensor) -> float:
        self.k += 1
        return min(1.0, self.k / 20)

    def loss(self, output: Tensor, batch: Any) -> Loss:
        loss = F.cross_entropy(output, batch[1], reduction="sum")
        weight = self.next_weight(loss.detach()) if torch.is_grad_enabled() else 1.0
        return Loss.sum(loss * weight, count=len(output))


class Listed(Annealing):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def next_weight(self, loss: Tensor) -> float:
        self.seen.append(float(loss))
        return 1.0 / len(self.seen)


class Recent(Annealing):
    def __init__(self) -> None:
        super().__init__()
        self.window, self.by_name = deque[float](maxlen=3), {"calls": 0}

    def next_weight(self, loss: Tensor) -> float:
        self.window.append(float(loss))
        self.by_name["calls"] += 1
        return sum(self.window) / (20 * self.by_name["calls"])


class Averaged(Annealing):
    """A running mean in a tensor that each call replaces, and one in an array that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.array = torch.zeros(()), np.zeros(2)

    def next_weight(self, loss: Tensor) -> float:
        self.mean = 0.9 * self.mean + 0.1 * loss
        self.array += 1
        return float(self.mean) / 10 + float(self.array[1]) / 10


class Added(Annealing):
    """A counter that the first call creates."""

    def next_weight(self, loss: Tensor) -> float:
        self.count = getattr(self, "count", 0) + 1
        return self.count / 10


class Dropped(Annealing):
    """An attribute that the first call deletes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def next_weight(self, loss: Tensor) -> float:
        if hasattr(self, "first"):
            del self.first
            return 0.1
        return 1.0


KINDS: list[type[Annealing]] = [Annealing, Listed, Recent, Averaged, Added, Dropped]


def plain_loop(kind: type[Annealing]) -> tuple[list[float], Tensor]:
    """Return the loss of each step, and the weight after the last one."""
    torch.manual_seed(0)
    task = kind()
    model, losses = task.model(), []
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for step in range(STEPS):
        ids = np.arange(step * SIZE, (step + 1) * SIZE)
        batch = task.data("train").read(ids)
        optimizer.zero_grad()
        total = task.loss(task.forward(model, batch), batch).terms[0].total / SIZE
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    return losses, model.weight.detach()


def settings(**tables: Any) -> RunSpec:
    return RunSpec(
        optim={"name": "sgd", "lr": LR, "momentum": 0.0, "weight_decay": 0.0, "clip": 0},
        schedule={"name": "constant"},
        train={"length": f"{STEPS} steps", "batch": SIZE},
        data={"shuffle": False},
        **{"evaluate": {"every": "2 steps", "split": "train"}, **tables},
    )


def train(task: Any, folder: Path, until: int = STEPS) -> tuple[list[float], Any]:
    losses = []
    with Run(settings(), task, folder=folder, quiet=True) as run:
        for report in run.steps():
            losses.append(float(report.loss or 0.0))
            if run.evaluation_due:
                run.evaluate()
            if report.step == until < STEPS:
                run.save()
                break
        return losses, run.model.weight.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_checks_and_resumes_leave_attributes_of_the_task_as_in_a_plain_loop(
    kind: type[Annealing], tmp_path: Path
) -> None:
    expected, weight = plain_loop(kind)
    first, _ = train(kind(), tmp_path, until=HALF)
    rest, found = train(kind(), tmp_path)
    assert [*first, *rest] == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(found, weight, rtol=1e-5, atol=1e-6)


def stored_in(folder: Path) -> dict[str, Any]:
    tree = json.loads((manifest.step_folder(folder, STEPS) / "state.json").read_text())
    return dict(tree.get("task_attributes", {}).get("values", {}))


def test_only_attributes_that_change_are_stored(tmp_path: Path) -> None:
    class Unchanged(Annealing):
        def next_weight(self, loss: Tensor) -> float:
            self.table[0] += 1  # too large to be more than data
            self.optimizer_of_mine = nn.Linear(1, 1)
            return 1.0

    train(Annealing(), tmp_path / "a")
    train(Unchanged(), tmp_path / "b")
    assert stored_in(tmp_path / "a") == {"k": STEPS}
    assert stored_in(tmp_path / "b") == {}


def test_an_attribute_that_grows_too_large_is_named(tmp_path: Path) -> None:
    class Growing(Listed):
        def next_weight(self, loss: Tensor) -> float:
            self.seen.extend([0.0] * 4_000)
            return 1.0

    train(Growing(), tmp_path)
    (fault,) = [
        each for each in records(tmp_path) if isinstance(each, Fault) and each.fault == "attributes"
    ]
    assert "seen (list) of the task changes while it trains" in fault.detail
    assert "return it from state() of the task" in fault.action


def test_an_evaluation_may_collect_outputs_in_the_task(tmp_path: Path) -> None:
    class Collecting(Annealing):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Tensor] = []

        def metrics(self, output: Tensor, batch: Any) -> dict[str, Any]:
            self.outputs.append(output)
            return {}

    task = Collecting()
    with Run(settings(), task, folder=tmp_path, quiet=True) as run:
        assert task.outputs == []
        run.evaluate()
        assert sum(map(len, task.outputs)) == 24
        for _ in run.steps():
            pass
