"""Five kinds of data, one task.

Tensors, a dataset, torch's loader, a loader of your own, a source of your own.

python examples/bring_your_data.py
surefoot train examples/bring_your_data.py:AnyData --set task.kind=loader

Whatever `data(split)` gives is taken as it is. What can be read by number is shuffled and seeks;
what can only be read forwards is named in the notes of the run as `replayed`, gives one of its own
batches a step, and keeps its own order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from surefoot import Loss, Run, RunSpec
from surefoot.metrics import Mean, accuracy

Batch = tuple[Tensor, Tensor]
Kind = Literal["tensors", "dataset", "loader", "own_loader", "own_source"]
KINDS: tuple[Kind, ...] = ("tensors", "dataset", "loader", "own_loader", "own_source")


class OwnLoader:
    """Anything that can be iterated anew and knows its length.

    Batches of `size` in an order of its own.
    """

    def __init__(self, pixels: Tensor, labels: Tensor, size: int = 64) -> None:
        self.pixels, self.labels, self.size, self.passes = pixels, labels, size, 0

    def __len__(self) -> int:
        return -(-len(self.labels) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        self.passes += 1
        order = torch.randperm(
            len(self.labels), generator=torch.Generator().manual_seed(self.passes)
        )
        for chosen in order.split(self.size):
            yield self.pixels[chosen], self.labels[chosen]


class OwnSource:
    """Samples by number: four members make a source that seeks, and says so."""

    guarantee = "proven"
    digest = "digits of scikit-learn, every row"

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, ids: np.ndarray) -> Batch:
        rows = torch.from_numpy(ids)
        return self.pixels[rows], self.labels[rows]

    def describe(self) -> str:
        return f"{len(self):,} digits"


class AnyData:
    """Digits, brought in one of five ways."""

    def __init__(self, kind: Kind = "tensors") -> None:
        self.kind = kind

    def data(self, split: str) -> Any:
        pixels, labels = load_digits(return_X_y=True)
        is_test = np.arange(len(labels)) % 5 == 0
        chosen = is_test if split == "test" else ~is_test
        tensors = torch.from_numpy(pixels[chosen]).float() / 16, torch.from_numpy(labels[chosen])
        if self.kind == "tensors":
            return tensors
        if self.kind == "dataset":
            return TensorDataset(*tensors)
        if self.kind == "loader":
            return DataLoader(TensorDataset(*tensors), batch_size=64, shuffle=split == "train")
        return OwnLoader(*tensors) if self.kind == "own_loader" else OwnSource(*tensors)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0])

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), count=len(output))

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch[1])}


def main(kind: Kind, folder: str | None = None) -> Run:
    gives_batches = kind in ("loader", "own_loader")  # then train.batch is theirs
    train = {"length": "8 epochs"} | ({} if gives_batches else {"batch": 64})
    with Run(RunSpec(optim={"lr": 5e-3}, train=train), AnyData(kind), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    for kind in KINDS:
        main(kind)
