"""A task that remembers: classes that go badly weigh more.

What it remembers is its own state; the weights are averaged (EMA).

python examples/ema_state.py
surefoot train examples/ema_state.py:HardClasses --set optim.ema=0.99

`state()` names what the task wants kept. Evaluation puts it back as it found it, like buffers and
random streams, and a checkpoint will hold it. The averaged weights are what is evaluated and saved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.data import Arrays
from surefoot.metrics import Mean, accuracy

Batch = dict[str, Tensor]


class HardClasses:
    """Digits, each weighed by how hard its class has been lately (`memory` steps, roughly)."""

    def __init__(self, memory: float = 20.0) -> None:
        self.memory = memory
        self.hardness = torch.ones(10)  # running mean loss of each class

    def state(self) -> dict[str, Tensor]:
        return {"hardness": self.hardness}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, split: str) -> Arrays:
        pixels, labels = load_digits(return_X_y=True)
        rows = (
            slice(0, None, 5)
            if split == "test"
            else [number for number in range(len(labels)) if number % 5]
        )
        return Arrays(pixels=pixels[rows].astype("float32") / 16, labels=labels[rows])

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["pixels"])

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        losses = F.cross_entropy(output, batch["labels"], reduction="none")
        # a task is not told the device; the batch knows it
        hardness = self.hardness.to(losses.device)
        weights = (hardness / hardness.mean())[batch["labels"]]
        self._remember(hardness, losses.detach(), batch["labels"])
        return Loss.sum((weights * losses).sum(), count=len(losses))

    def _remember(self, hardness: Tensor, losses: Tensor, labels: Tensor) -> None:
        sums = torch.zeros_like(hardness).index_add_(0, labels, losses)
        seen = labels.bincount(minlength=10)
        means = torch.where(seen > 0, sums / seen.clamp(min=1), hardness)
        # in place: the name in state() stays true
        self.hardness.copy_(hardness.lerp(means, 1 / self.memory))

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch["labels"])}


def main(folder: str | None = None) -> Run:
    spec = RunSpec(optim={"lr": 5e-3, "ema": 0.99}, train={"length": "10 epochs", "batch": 64})
    with Run(spec, HardClasses(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
