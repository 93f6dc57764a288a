"""What a model draws in its forward pass depends on the step and the microbatch.

Whatever draws it, ranks draw as one process does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from tests.world.ranks import run_ranks

WIDTH = 6
DRAWN: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(WIDTH),
    "numpy": lambda: np.random.rand(WIDTH),  # noqa: NPY002 - as libraries do it
    "numpy, which places": lambda: np.isin(
        np.arange(WIDTH),
        np.random.choice(WIDTH, 3, replace=False),  # noqa: NPY002
    ),
    "numpy, normal": lambda: np.random.randn(WIDTH + 1)[1:],  # noqa: NPY002 - an odd number: one of a pair is left
    "python": lambda: [random.random() for _ in range(WIDTH)],
    "python, whether a layer is left out": lambda: [float(random.random() < 0.5)] * WIDTH,
    "python, which places": lambda: [
        float(number in random.sample(range(WIDTH), 3)) for number in range(WIDTH)
    ],
}


class Masked(nn.Module):
    """Multiplies its input by what it draws while it is trained."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw, self.linear = draw, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * torch.as_tensor(self.draw(), dtype=x.dtype)
        output: Tensor = self.linear(x)
        return output


class Drawing:
    def __init__(self, name: str) -> None:
        self.name = name

    def model(self) -> nn.Module:
        return Masked(DRAWN[self.name]).double()

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randn(24, WIDTH, generator=draw, dtype=torch.float64), torch.arange(24) % 3
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(
            nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
        )


def trained(name: str, folder: Path, steps: int = 2) -> dict[str, Any]:
    spec = RunSpec(
        train={"length": f"{steps} steps", "batch": 8, "microbatch": 2, "threads": 1},
        optim={"lr": 0.02},
        evaluate={"split": "train", "every": "9 epochs"},
        checkpoint={"every": "never"},
        schedule={"name": "constant"},
        observe={"tensorboard": False},
    )
    with Run(spec, Drawing(name), folder=folder, quiet=True) as run:
        losses = [float(report.loss or 0.0) for report in run.steps()]
        return {"losses": losses, "weights": [each.tolist() for each in run.model.parameters()]}


def test_ranks_draw_what_one_process_draws_by_torch_numpy_and_python(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        return {name: trained(name, tmp_path / "ranks" / name) for name in DRAWN}

    alone = {name: trained(name, tmp_path / "alone" / name) for name in DRAWN}
    for found in run_ranks(2, job, tmp_path / "results"):
        assert "error" not in found, found
        for name, expected in alone.items():
            torch.testing.assert_close(
                found[name]["losses"], expected["losses"], rtol=1e-9, atol=0.0, msg=name
            )
            for one, other in zip(found[name]["weights"], expected["weights"], strict=True):
                torch.testing.assert_close(
                    torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=1e-8, msg=name
                )


def test_what_is_drawn_differs_from_step_to_step(tmp_path: Path) -> None:
    """The same samples in each step: their losses differ by what is drawn."""
    drawn: list[Any] = []
    DRAWN["kept"] = lambda: drawn.append([*DRAWN["numpy"](), *DRAWN["python"]()]) or [1.0] * WIDTH
    trained("kept", tmp_path / "run", steps=3)
    del DRAWN["kept"]
    assert len({tuple(each) for each in drawn[-3 * 4 :]}) == 3 * 4  # after those of the checks
