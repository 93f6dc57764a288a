"""Which lower half belongs to which upper half?

Two encoders learn it from pairs alone, by a loss over the whole batch.

python examples/contrastive.py
surefoot train examples/contrastive.py:Halves

Every pair is held against all others of its batch, so the loss of a batch is not the sum of the
losses of its parts: `additive=False` says so, and a spec with microbatches is refused. On several
ranks `surefoot.all_gather` gives each rank the embeddings of all: the weights are those of one
process. (InfoNCE: van den Oord, Li and Vinyals, 2018.)
"""

# B batch, D embedding

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec, all_gather
from surefoot.data import Arrays
from surefoot.metrics import Mean, accuracy

Batch = dict[str, Tensor]


class Halves:
    """The upper and the lower half of each digit, embedded near each other."""

    def __init__(self, width: int = 32, temperature: float = 0.1) -> None:
        self.width, self.temperature = width, temperature

    def model(self) -> nn.Module:
        def encoder() -> nn.Module:
            return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, self.width))

        return nn.ModuleDict({"upper": encoder(), "lower": encoder()})

    def data(self, split: str) -> Arrays:
        pixels = torch.from_numpy(load_digits().data).float() / 16
        is_test = torch.arange(len(pixels)) % 5 == 0
        chosen = pixels[is_test if split == "test" else ~is_test]
        return Arrays(upper=chosen[:, :32], lower=chosen[:, 32:])

    def forward(self, model: nn.ModuleDict, batch: Batch) -> Tensor:
        """How alike each upper half is to each lower half of the batch, (B, B)."""
        upper_BD = F.normalize(model["upper"](batch["upper"]), dim=-1)
        lower_BD = F.normalize(model["lower"](batch["lower"]), dim=-1)
        return all_gather(upper_BD) @ all_gather(lower_BD).T / self.temperature

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        own = torch.arange(len(output), device=output.device)
        both_ways = F.cross_entropy(output, own, reduction="sum") + F.cross_entropy(
            output.T, own, reduction="sum"
        )
        return Loss.sum(both_ways / 2, count=len(output), additive=False)

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        return {"found at once": accuracy(output, torch.arange(len(output), device=output.device))}


def main(folder: str | None = None) -> Run:
    spec = RunSpec(
        optim={"lr": 3e-3},
        train={"length": "30 epochs", "batch": 128},
        evaluate={"every": "10 epochs", "batch": 60},  # 1 of 60 is found by chance
    )
    with Run(spec, Halves(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
