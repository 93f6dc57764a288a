"""Contrastive learning (SimCLR: Chen et al., 2020).

Two views of an image find each other among all views of the batch.

python examples/kinds/contrastive.py
surefoot train examples/kinds/contrastive.py:Views --steps 40

The loss compares the samples of the batch with each other: `additive=False`, without microbatches.
`all_gather` joins the ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec, all_gather
from surefoot.data import Arrays, Keys
from surefoot.metrics import Mean, mean_of

SPEC = RunSpec(
    optim={"name": "adam", "lr": 2e-3, "weight_decay": 0.0},
    train={"length": "15 epochs", "batch": 128},
    data={"last_batch": "drop"},
    evaluate={"every": "5 epochs", "batch": 60},
)
Batch = dict[str, Tensor]


class Views:
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))

    def data(self, split: str) -> Arrays:
        pixels, labels = load_digits(return_X_y=True)
        rows = (
            slice(0, None, 5)
            if split == "test"
            else [number for number in range(len(labels)) if number % 5]
        )
        images = torch.from_numpy(pixels[rows].reshape(-1, 1, 8, 8) / 16).float()
        return Arrays(first=images, second=images, labels=labels[rows])

    def augment(self, batch: Batch, keys: Keys) -> Batch:
        """Each view is moved by up to a pixel, and noisy."""

        def view(images: Tensor, stream: int) -> Tensor:
            padded, shift = F.pad(images, (1, 1, 1, 1)), keys.integers(0, 3, 2, stream=stream)
            moved = torch.stack(
                [
                    each[:, y : y + 8, x : x + 8]
                    for each, (y, x) in zip(padded, shift.tolist(), strict=True)
                ]
            )
            return moved + 0.1 * keys.normal(64, stream=stream + 1).view_as(images)

        return {**batch, "first": view(batch["first"], 0), "second": view(batch["second"], 2)}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """The views of all ranks, (2, B, D), of length 1."""
        return torch.stack(
            [all_gather(F.normalize(model(batch[name]), dim=1)) for name in ("first", "second")]
        )

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        views = output.flatten(0, 1)
        alike = (views @ views.T / 0.2).fill_diagonal_(-torch.inf)
        partner = torch.arange(len(views), device=views.device).roll(len(views) // 2)
        return Loss.sum(
            F.cross_entropy(alike, partner, reduction="sum"), count=len(views), additive=False
        )

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        nearest = (output[0] @ output[0].T).fill_diagonal_(-1).argmax(1)
        right = (batch["labels"][nearest] == batch["labels"]).sum()
        # chance 0.1
        return {"nearest neighbor is the same digit": mean_of(right, len(nearest), better="higher")}


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Views(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
