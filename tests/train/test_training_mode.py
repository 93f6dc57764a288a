"""What a model does only in training mode is seen before the run, and leaves no trace in it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core.errors import TaskError
from surefoot.train.run import Run, drive

NUM_PASSES = 0
DRAWS = random.Random(1)


class Codebook(nn.Module):
    """Nearest rows of a table that follows the mean of its inputs, as in VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(4, 8))

    def forward(self, x_BD: Tensor) -> Tensor:
        nearest = torch.cdist(x_BD, self.rows).argmin(1)  # type: ignore[arg-type]
        found: Tensor = x_BD + (self.rows[nearest] - x_BD).detach()  # type: ignore[index]
        if self.training:
            for row in nearest.unique().tolist():
                self.rows[row].lerp_(x_BD[nearest == row].mean(0).detach(), 0.5)  # type: ignore[index]
        return found + 0.1 * x_BD


class Normalizer(nn.Module):
    """Running mean and size of the inputs, as in reinforcement learning."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = torch.zeros(8)

    def forward(self, x_BD: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x_BD.detach().mean(0)
        return x_BD - self.mean


PARTS: dict[str, Any] = {
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "a codebook": Codebook,
    "a normalizer": Normalizer,
    "a warm-up": lambda: WarmUp(),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Dropout1d(0.2)),
    "attention with dropout": lambda: Attention(),
    "a recurrent layer": lambda: Recurrent(),
    "nothing": nn.Identity,
}


class WarmUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_passes = 0

    def forward(self, x_BD: Tensor) -> Tensor:
        self.num_passes += self.training
        return x_BD * min(1.0, self.num_passes / 10)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, x_BD: Tensor) -> Tensor:
        found: Tensor = self.layer(x_BD[:, None])[:, 0]
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x_BD: Tensor) -> Tensor:
        found: Tensor = self.layer(x_BD[:, None])[0][:, 0]
        return found


class Task:
    def __init__(self, part: str, loss: str = "a sum") -> None:
        self.part, self.kind, self.num_passes, self.seen = part, loss, 0, list[int]()
        self.draws = np.random.default_rng(0)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), PARTS[self.part](), nn.Linear(8, 3))

    def data(self, split: str) -> Arrays:
        generator = torch.Generator().manual_seed(1)
        return Arrays(torch.randn(32, 4, generator=generator), torch.arange(32) % 3)

    def forward(self, model: nn.Module, batch: Any) -> tuple[bool, Tensor]:
        global NUM_PASSES
        if model.training:
            NUM_PASSES += 1
            self.num_passes += 1
            self.seen.append(len(batch[0]))
            DRAWS.random()
            self.draws.random()
        return model.training, model(batch[0])

    def loss(self, output: tuple[bool, Tensor], batch: Any) -> Loss:
        trains, logits = output
        total = F.cross_entropy(logits, batch[1], reduction="sum")
        if trains and self.kind == "a mean":
            total = total / len(logits)
        if trains and self.kind == "a balance of classes":
            total = total + 10 * logits.softmax(1).sum(0).square().sum()
        if trains and self.kind == "a penalty":
            total = total + 1e-3 * logits.detach().new_tensor(5.0) + 0 * total
        return Loss.sum(total, len(logits))


def prepare(task: Task, folder: Path, **train: Any) -> list[str]:
    spec = RunSpec(
        train={"length": "1 step", "batch": 8, "threads": 1, **train},
        observe={"tensorboard": False},
    )
    with Run(spec, task, folder=folder, quiet=True) as run:
        return list(run.assembly.warnings)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("spectral_norm", "weight_u"),
        ("a warm-up", "num_passes"),
        ("a codebook", "rows"),
        ("a normalizer", "mean"),
    ],
)
def test_state_that_only_training_changes_is_reported_with_microbatches(
    part: str, name: str, tmp_path: Path
) -> None:
    notes = prepare(Task(part), tmp_path / "run", microbatch=4)
    (note,) = [each for each in notes if "depends on the previous microbatch" in each]
    assert name in note


@pytest.mark.parametrize("part", ["dropout", "attention with dropout", "a recurrent layer"])
def test_dropout_and_batch_norms_are_no_reason_to_report(part: str, tmp_path: Path) -> None:
    notes = prepare(Task(part), tmp_path / "run", microbatch=4)
    assert not [each for each in notes if "previous microbatch" in each or "a sum" in each]


def test_a_mean_that_only_training_computes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="update loss in training mode is a mean, not a sum"):
        prepare(Task("dropout", "a mean"), tmp_path / "run")


@pytest.mark.parametrize("kind", ["a balance of classes", "a penalty"])
def test_another_loss_that_only_training_adds_is_refused_with_microbatches(
    kind: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match="in training mode is not a sum over samples"):
        prepare(Task("nothing", kind), tmp_path / "run", microbatch=4)


def test_a_trial_leaves_no_trace(tmp_path: Path) -> None:
    task, before, state = Task("a normalizer"), NUM_PASSES, DRAWS.getstate()
    expected = np.random.default_rng(0).random()
    prepare(task, tmp_path / "run", microbatch=4)
    assert (task.num_passes, task.seen, NUM_PASSES) == (0, [], before)
    assert DRAWS.getstate() == state
    assert task.draws.random() == expected


@pytest.mark.parametrize(("part", "is_tried"), [("nothing", False), ("dropout", True)])
def test_a_model_without_modes_is_not_tried_in_training_mode(
    part: str, is_tried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that writes what it trains on into a file writes no batch of a trial."""
    written = tmp_path / "written"
    forward = Task.forward

    def write(self: Task, model: nn.Module, batch: Any) -> Any:
        if model.training:
            with written.open("a") as file:
                file.write(f"{len(batch[0])}\n")
        return forward(self, model, batch)

    monkeypatch.setattr(Task, "forward", write)
    prepare(Task(part), tmp_path / "run")
    assert written.exists() == is_tried


def test_a_run_trains_what_a_plain_loop_trains(tmp_path: Path) -> None:
    task = Task("a codebook")
    spec = RunSpec(
        optim={"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0},
        schedule={"name": "constant"},
        train={"length": "3 steps", "batch": 8, "threads": 1},
        data={"shuffle": False},
        observe={"tensorboard": False},
    )
    with Run(spec, task, folder=tmp_path / "run", quiet=True) as run:
        drive(run)
    model, (x, y) = Task("a codebook").model(), Task("a codebook").data("train").read(np.arange(32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 24, 8):
        loss = F.cross_entropy(model(x[start : start + 8]), y[start : start + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
