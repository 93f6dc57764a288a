"""Weights that the code of a model writes itself, in a forward pass, a hook or `train()`.

An evaluation leaves them as they are, and a run trains what a plain PyTorch loop trains.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.events import Started
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.runtime.attributes.rewritten import find_rewritten, watch_weights
from surefoot.train.run import Run, drive
from tests.conftest import ROOT
from tests.train.small import records

LR, STEPS, BATCH = 0.1, 4, 8


class Rewriting(nn.Module):
    """A classifier of 20 tokens whose table is written as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Parameter(torch.randn(20, 8))
        self.head = nn.Linear(8, 3)
        self.is_merged = False
        if how == "clamped by a hook":
            self.register_forward_pre_hook(self.clamp)

    def clamp(self, module: nn.Module, inputs: Any) -> None:
        with torch.no_grad():
            self.table.clamp_(-0.5, 0.5)

    def train(self, mode: bool = True) -> Rewriting:
        """Merge the head into the table in evaluation mode, as adapters of low rank do."""
        if self.how == "merged by eval()" and mode == self.is_merged:
            self.table.data += -0.5 if mode else 0.5
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, ids_B: Tensor) -> Tensor:
        if self.how == "a lookup with max_norm":
            found: Tensor = self.head(F.embedding(ids_B, self.table, max_norm=1.0))
            return found
        if self.how == "normalized in place":
            with torch.no_grad():
                self.table.copy_(F.normalize(self.table, dim=1))
        if self.how == "scaled in evaluation" and not self.training:
            self.table.data.mul_(0.5)
        if self.how == "assigned":
            self.table.data = F.normalize(self.table.data, dim=1)
        if self.how == "written through a view":
            self.table.detach()[:10].view(-1).mul_(0.99)
        result: Tensor = self.head(self.table[ids_B])
        return result


WAYS = [
    "a lookup with max_norm",
    "normalized in place",
    "scaled in evaluation",
    "assigned",
    "written through a view",
    "clamped by a hook",
    "merged by eval()",
]


class Tokens:
    def __init__(self, how: str) -> None:
        self.how = how

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return Rewriting(self.how).double()

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randint(0, 20, (32,), generator=draw), torch.randint(0, 3, (32,), generator=draw)
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(output))


def plain(how: str) -> list[Tensor]:
    """The weights that a loop in plain PyTorch trains, without evaluations."""
    task = Tokens(how)
    model, data = task.model(), task.data("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    ids, labels = data.read(torch.arange(32).numpy())
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        loss = F.cross_entropy(model(ids[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def spec(**train: Any) -> RunSpec:
    return RunSpec(
        optim={"name": "sgd", "lr": LR, "momentum": 0.9, "weight_decay": 0.0, "clip": 0.0},
        schedule={"name": "constant"},
        train={"length": f"{STEPS} steps", "batch": BATCH, "threads": 1, **train},
        data={"shuffle": False},
        evaluate={"every": "1 step"},
        checkpoint={"every": "never"},
        observe={"tensorboard": False},
    )


@pytest.mark.parametrize("how", WAYS)
def test_a_run_with_evaluations_trains_what_a_plain_loop_trains(how: str, tmp_path: Path) -> None:
    with Run(spec(), Tokens(how), folder=tmp_path / "run", quiet=True) as run:
        drive(run)
        for mine, other in zip(run.model.parameters(), plain(how), strict=True):
            torch.testing.assert_close(mine.detach(), other, rtol=1e-9, atol=1e-11)
    started = records(tmp_path / "run")[0]
    assert isinstance(started, Started)
    assert [note for note in started.notes if note.startswith("a forward pass changes table:")]


@pytest.mark.parametrize(
    ("how", "is_reported"), [("written through a view", True), ("normalized in place", False)]
)
def test_weights_that_each_microbatch_changes_further_are_reported(
    how: str, is_reported: bool, tmp_path: Path
) -> None:
    with Run(spec(microbatch=4), Tokens(how), folder=tmp_path / "run", quiet=True) as run:
        warnings = run.assembly.warnings
    words = "depends on the previous microbatch, by table"
    assert any(words in each for each in warnings) is is_reported


def test_a_model_that_leaves_its_weights_alone_is_not_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4))
    with watch_weights(model):
        model(torch.randn(8, 4))
    assert find_rewritten(model) == {}


def test_a_run_that_is_checked_imports_no_compiler(tmp_path: Path) -> None:
    """A dispatch mode that torch keeps away from its compiler imports it: a second of a start."""
    script = (
        "import sys; from surefoot import Run; from tests.train.small import Small, spec\n"
        "with Run(spec(2), Small(), folder='run', quiet=True) as run:\n"
        "    assert [report.step for report in run.steps()] == [1, 2]\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["False"]), done.stderr
