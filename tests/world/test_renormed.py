"""Weights that a forward pass changes, on ranks: lookups with max_norm, normalized prototypes.

Replicas stay those of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core import place
from surefoot.train.run import Run, drive
from tests.world.ranks import run_ranks


class Table(nn.Module):
    """A table of the user, which the forward pass writes as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.table = how, nn.Parameter(torch.randn(20, 8))

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "looked up":
            return F.embedding(ids, self.table, max_norm=1.0)
        if self.how == "assigned":
            self.table.data = F.normalize(self.table.data, dim=1)
        if self.how == "rows of the batch":
            with torch.no_grad():
                self.table[ids] = F.normalize(self.table[ids], dim=-1)
        if self.how == "clamped":
            self.table.data.clamp_(-0.5, 0.5)
        return self.table[ids]


TABLES = {
    "looked up": lambda: Table("looked up"),
    "assigned": lambda: Table("assigned"),
    "rows of the batch": lambda: Table("rows of the batch"),
    "clamped": lambda: Table("clamped"),
    "a table": lambda: nn.Embedding(20, 8, max_norm=1.0),
    "of another norm": lambda: nn.Embedding(20, 8, max_norm=1.5, norm_type=1.0),
    "with a padding row": lambda: nn.Embedding(20, 8, max_norm=1.0, padding_idx=0),
    "a bag": lambda: nn.EmbeddingBag(20, 8, max_norm=1.0),
}


class Renormed:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        return nn.Sequential(TABLES[self.kind](), nn.Flatten(), nn.Linear(8, 3)).double()

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randint(0, 20, (32, 1), generator=draw),
            torch.randint(0, 3, (32,), generator=draw),
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), count=len(output))


def train(folder: Path, kind: str, num_ranks: int, **layout: Any) -> Any:
    spec = RunSpec(
        optim={"lr": 0.05},
        train={"length": "12 steps", "batch": 8, "threads": 1},
        evaluate={"every": "5 steps"},
        checkpoint={"every": "never"},
        observe={"tensorboard": False},
        layout={"check_every": "1 step", **layout},
    )

    def job(rank: int) -> Any:
        with Run(spec, Renormed(kind), folder=folder, quiet=True) as run:
            drive(run)
            return [each.detach().tolist() for each in run.model.parameters()]

    found = run_ranks(num_ranks, job, folder.with_suffix(".ranks")) if num_ranks > 1 else [job(0)]
    assert place.here() is not None
    for each in found:
        assert not isinstance(each, dict), each
    return [[torch.tensor(each) for each in weights] for weights in found]


@pytest.mark.quick("stage 1-with a padding row", "replicas-a bag", "stage 1-rows of the batch")
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("layout", [{}, {"shard": 2, "zero_stage": 1}], ids=["replicas", "stage 1"])
def test_two_ranks_train_what_one_process_does(
    kind: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    (one,), two = train(tmp_path / "one", kind, 1), train(tmp_path / "two", kind, 2, **layout)
    for weights in two:
        for mine, other in zip(weights, one, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)


def test_a_stage_that_gathers_weights_for_a_pass_refuses_and_says_why(tmp_path: Path) -> None:
    spec = RunSpec(
        train={"length": "2 steps", "batch": 8, "threads": 1},
        layout={"shard": 2, "zero_stage": 2},
        observe={"tensorboard": False},
    )

    def job(rank: int) -> Any:
        with Run(spec, Renormed("a table"), folder=tmp_path / "run", quiet=True):
            return None

    found = run_ranks(2, job, tmp_path / "ranks")
    assert all("a forward pass changes 0.weight itself" in each["error"] for each in found)
