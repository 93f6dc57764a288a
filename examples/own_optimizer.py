r"""A task that brings its own optimizer and its own schedule.

Guard, clipping and accumulation still work around them.

python examples/own_optimizer.py
surefoot train examples/own_optimizer.py:OwnOptimizer

These two settings are overruled by the task:

surefoot train examples/own_optimizer.py:OwnOptimizer --set optim.name=adamw \
    --set schedule.name=cosine
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.data import Arrays
from surefoot.metrics import Mean, accuracy

Batch = tuple[Tensor, Tensor]


class Lion(torch.optim.Optimizer):
    """The sign of an interpolation between gradient and momentum.

    Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(
                    torch.lerp(parameter.grad, momentum, beta1).sign_(), alpha=group["lr"]
                )
                momentum.lerp_(parameter.grad, 1 - beta2)


class OwnOptimizer:
    """Digits with Lion and a schedule of its own: a warm-up, then two waves."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def data(self, split: str) -> Arrays:
        pixels, labels = load_digits(return_X_y=True)
        rows = (
            slice(0, None, 5)
            if split == "test"
            else [number for number in range(len(labels)) if number % 5]
        )
        return Arrays(pixels[rows].astype("float32") / 16, labels[rows])

    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """`groups` are ready: norms and biases without decay, multipliers from the spec.

        A rate that the spec states stands in them.
        """
        return Lion(groups, lr=3e-3)

    def schedule(self, step: int, total_steps: int) -> float:
        """What the rate is multiplied by at `step`, from 0."""
        warmup = total_steps // 10
        if step < warmup:
            return (step + 1) / warmup
        return 0.05 + 0.95 * abs(math.cos(math.pi * (step - warmup) / (total_steps - warmup)))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0])

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), count=len(output))

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch[1])}


def main(folder: str | None = None) -> Run:
    spec = RunSpec(train={"length": "8 epochs", "batch": 64})
    with Run(spec, OwnOptimizer(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
