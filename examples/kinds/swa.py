"""Stochastic weight averaging: the mean of the weights of the last steps (Izmailov et al., 2018).

It is made by torch.optim.swa_utils.

python examples/kinds/swa.py
surefoot train examples/kinds/swa.py:Averaged --steps 40     (trains without the average)

The average is the task's own state: checkpoints hold it. Its BatchNorm statistics are taken at the
end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from surefoot import Loss, Run, RunSpec
from surefoot.data import Arrays
from surefoot.metrics import Mean, accuracy

FROM = 0.6  # of the run, with a constant learning rate from there on
Batch = tuple[Tensor, Tensor]
SPEC = RunSpec(
    optim={"clip": 0.0, "weight_decay": 0.0},
    train={"length": "8 epochs", "batch": 64},
    evaluate={"every": "4 epochs"},
)


class Averaged:
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
        self.average = AveragedModel(model)
        return model

    def data(self, split: str) -> Arrays:
        pixels, labels = load_digits(return_X_y=True)
        rows = (
            slice(0, None, 5)
            if split == "test"
            else [number for number in range(len(labels)) if number % 5]
        )
        return Arrays(pixels[rows].astype("float32") / 16, labels[rows])

    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def schedule(self, step: int, total_steps: int) -> float:
        """Down to half of the learning rate, at which the weights are averaged; as SWALR."""
        return 1.0 - 0.5 * min(1.0, step / (FROM * total_steps))

    def state(self) -> Mapping[str, Any]:
        return {"average": self.average}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0])

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), count=len(output))

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch[1])}


def after_step(run: Run, task: Averaged, total_steps: int) -> None:
    """What the loop does after each step."""
    if run.step > FROM * total_steps:
        task.average.update_parameters(run.model)


def main(folder: str | None = None) -> Run:
    task = Averaged()
    with Run(SPEC, task, folder=folder) as run:
        for _ in run.steps():
            after_step(run, task, 8 * 22)
            if run.evaluation_due:
                run.evaluate()
    train, test = task.data("train"), task.data("test")
    update_bn([train.read(np.arange(len(train)))], task.average)
    task.average.eval()
    images, labels = test.read(np.arange(len(test)))
    accuracy = (task.average(images).argmax(1) == labels).float().mean()
    print(f"accuracy of the average {accuracy:.3f}")
    return run


if __name__ == "__main__":
    main()
