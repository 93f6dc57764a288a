"""A model that keeps state from one batch of an evaluation to the next.

It has the score of one process on several ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.metrics import Mean, mean_of
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.train.run import Run
from tests.world.ranks import run_ranks

SAMPLES, BATCH = 20, 4


class Running(nn.Module):
    """Adds to its output a mean over all batches so far, which it keeps as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(1, 1)
        if how == "buffer":
            self.register_buffer("kept", torch.zeros(1))
        else:
            self.kept: Any = [torch.zeros(1)] if how == "list" else torch.zeros(1)
        self.__dict__["counts"] = Counts()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.layer(x)
        self.counts.add()
        if self.how == "table":
            self.kept = torch.full((1,), 0.5)
            return self.layer(x) + self.kept
        before = self.kept[0] if self.how == "list" else self.kept
        now = 0.5 * before.clone() + x.detach().mean(0)
        if self.how in ("task", "buffer"):
            self.kept.copy_(now)
        else:
            self.kept = [now] if self.how == "list" else now
        return self.layer(x) + now


class Counts:
    """Of passes, in an object that is not a state of the model."""

    def __init__(self) -> None:
        self.passes = 0

    def add(self) -> None:
        self.passes += 1


class Carrying:
    def __init__(self, how: str) -> None:
        self.how = how

    def model(self) -> nn.Module:
        self.net = Running(self.how)
        return self.net

    def data(self, split: str) -> Arrays:
        return Arrays(x=torch.arange(float(SAMPLES))[:, None] ** 2)

    def state(self) -> dict[str, Tensor]:
        return {"kept": self.net.kept} if self.how == "task" else {}

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output: Tensor = model(batch["x"])
        return output

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum((output - batch["x"]).abs().sum(), len(output))

    def metrics(self, output: Tensor, batch: dict[str, Tensor]) -> dict[str, Mean]:
        return {"mean": mean_of(output.double().sum(), len(output))}


def scored(how: str, folder: Path) -> dict[str, Any]:
    """The score after two steps, and how often this rank passed through the model for it."""
    spec = RunSpec(
        train={"length": "2 steps", "batch": BATCH, "threads": 1},
        optim={"name": "sgd", "lr": 1e-5, "momentum": 0.0},
        evaluate={"every": "9 epochs"},
        observe={"tensorboard": False},
    )
    task = Carrying(how)
    with Run(spec, task, folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
        before = task.net.counts.passes
        return {"score": run.evaluate().value, "passes": task.net.counts.passes - before}


@pytest.mark.quick("list", "buffer", "task")
@pytest.mark.parametrize("how", ["attribute", "list", "buffer", "task"])
def test_the_score_of_a_model_that_carries_state_is_that_of_one_process(
    how: str, tmp_path: Path
) -> None:
    expected = scored(how, tmp_path / "one")["score"]
    for found in run_ranks(2, lambda rank: scored(how, tmp_path / "run"), tmp_path / "ranks"):
        assert "error" not in found, found
        assert found["score"] == pytest.approx(expected, rel=1e-6)


def test_a_table_that_the_first_batch_builds_leaves_the_batches_shared(tmp_path: Path) -> None:
    expected = scored("table", tmp_path / "one")["score"]
    found = run_ranks(2, lambda rank: scored("table", tmp_path / "run"), tmp_path / "ranks")
    assert [each["score"] for each in found] == pytest.approx([expected] * 2, rel=1e-6)
    assert [each["passes"] for each in found] == [3, 2]  # of 5 batches
