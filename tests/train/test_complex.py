"""Complex parameters train as in a plain PyTorch loop, or are refused before step 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core.errors import SpecError
from surefoot.train.run import Run

STEPS, BATCH, LR = 4, 16, 0.01
Build = Callable[[Any], torch.optim.Optimizer]


class Mixed(nn.Module):
    """Two complex layers, the second large enough for moments in 8 bits, and a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(8, 64, dtype=torch.complex64),
            nn.Linear(64, 64, dtype=torch.complex64),
        )
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x.to(torch.complex64)).tanh()).abs())[:, 0]


class Product:
    def model(self) -> nn.Module:
        return Mixed()

    def data(self, split: str) -> Arrays:
        x = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(0))
        return Arrays(x=x, y=x[:, 0] * x[:, 1])

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output: Tensor = model(batch["x"])
        return output

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum((output - batch["y"]).square().sum(), len(output))


def train(folder: Path, **optim: Any) -> list[float | None]:
    spec = RunSpec(
        optim={"lr": LR, "weight_decay": 0.0, **optim},
        train={"length": f"{STEPS} steps", "batch": BATCH, "threads": 1},
        data={"shuffle": False},
        schedule={"name": "constant"},
        evaluate={"split": "train", "every": "9 epochs"},
        observe={"tensorboard": False},
    )
    with Run(spec, Product(), folder=folder, quiet=True) as run:
        return [report.loss for report in run.steps()]


def train_plain(build: Build) -> list[float]:
    torch.manual_seed(0)
    model, data, losses = Mixed(), Product().data("train"), []
    optimizer = build(model.parameters())
    for step in range(STEPS):
        batch = data.read(np.arange(step * BATCH, (step + 1) * BATCH))
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS: list[tuple[dict[str, Any], Build]] = [
    ({"name": "sgd"}, lambda parameters: torch.optim.SGD(parameters, LR, momentum=0.9)),
    ({"name": "adam"}, lambda parameters: torch.optim.Adam(parameters, LR)),
    ({"name": "adamw"}, lambda parameters: torch.optim.AdamW(parameters, LR, weight_decay=0.0)),
    # the real layer is the head
    ({"name": "muon"}, lambda parameters: torch.optim.AdamW(parameters, LR, weight_decay=0.0)),
    (
        {"name": "adamw", "state": "8bit"},
        lambda parameters: torch.optim.AdamW(parameters, LR, weight_decay=0.0),
    ),
    (
        {"name": "adamw", "ema": 0.9},
        lambda parameters: torch.optim.AdamW(parameters, LR, weight_decay=0.0),
    ),
]


@pytest.mark.parametrize(
    ("optim", "build"),
    OPTIMIZERS,
    ids=[" ".join(map(str, optim.values())) for optim, _ in OPTIMIZERS],
)
def test_complex_parameters_train_as_in_a_plain_loop(
    optim: dict[str, Any], build: Build, tmp_path: Path
) -> None:
    assert train(tmp_path / "run", **optim) == pytest.approx(train_plain(build), rel=1e-4)


def test_a_limit_of_each_element_is_refused_before_step_1(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a trained parameter is complex"):
        train(tmp_path / "run", clip=0.0, clip_value=0.1)
