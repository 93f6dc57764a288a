"""Sparse embeddings: word vectors whose gradients hold the rows of a batch alone.

The model is a skip-gram (Mikolov et al., 2013).

python examples/kinds/sparse_embeddings.py
surefoot train examples/kinds/sparse_embeddings.py:Words --steps 40

`nn.Embedding(sparse=True)` needs an optimizer that takes sparse gradients: the task's own
`SparseAdam`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.data import Arrays, Keys
from surefoot.metrics import Mean, mean_of

WORDS, TOPICS, NEGATIVES = 200, 10, 4  # words of a topic stand near each other
Batch = dict[str, Tensor]
SPEC = RunSpec(
    optim={"clip": 0.0}, train={"length": "8 epochs", "batch": 64}, evaluate={"every": "4 epochs"}
)


class Words:
    def model(self) -> nn.Module:
        tables = nn.ModuleDict(
            {name: nn.Embedding(WORDS, 16, sparse=True) for name in ("words", "contexts")}
        )
        for each in tables.values():
            nn.init.normal_(each.weight, std=0.1)
        return tables

    def data(self, split: str) -> Arrays:
        count, draws = (
            {"train": 4000, "test": 1000}[split],
            torch.Generator().manual_seed(int(split == "test")),
        )
        word = torch.randint(WORDS, (count,), generator=draws)
        near = word % TOPICS + TOPICS * torch.randint(WORDS // TOPICS, (count,), generator=draws)
        return Arrays(
            word=word, near=near, others=torch.randint(WORDS, (count, NEGATIVES), generator=draws)
        )

    def augment(self, batch: Batch, keys: Keys) -> Batch:
        return {**batch, "others": keys.integers(0, WORDS, NEGATIVES)}

    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(
            [parameter for group in groups for parameter in group["params"]], lr=2e-2
        )

    def forward(self, model: nn.ModuleDict, batch: Batch) -> Tensor:
        """How well the word goes with its neighbor, (B, 0), and with words that were drawn."""
        asked = torch.cat([batch["near"][:, None], batch["others"]], 1)
        return (model["contexts"](asked) @ model["words"](batch["word"])[:, :, None])[..., 0]

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        signs = torch.tensor([1.0] + [-1.0] * NEGATIVES, device=output.device)
        return Loss.sum(-F.logsigmoid(signs * output).sum(), count=len(output))

    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        ahead = (output[:, :1] > output[:, 1:]).float().sum()
        # chance 0.5
        return {
            "neighbor ahead of a drawn word": mean_of(ahead, output[:, 1:].numel(), better="higher")
        }


def main(folder: str | None = None) -> Run:
    with Run(SPEC, Words(), folder=folder) as run:
        for _ in run.steps():
            if run.evaluation_due:
                run.evaluate()
    return run


if __name__ == "__main__":
    main()
