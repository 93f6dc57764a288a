"""Under stages 2 and 3 a block that some ranks call and others do not is named.

So are its parameters, and nothing is trained by it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from surefoot.core.errors import UserCodeError
from tests.world.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("loaded_for_shards")


class Branching(nn.Module):
    """Rank 1 takes a different way than rank 0, `rare` in training alone.

    `even` and `odd` are of one size, `rare` of another.
    """

    def __init__(self, branches: str) -> None:
        super().__init__()
        self.branches = branches
        self.words, self.even, self.odd, self.head = (
            nn.Embedding(10, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )
        self.rare = nn.Linear(6, 6, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, is_odd = (
            self.words(ids),
            os.environ["RANK"] == "1" and (self.training or self.branches != "rare"),
        )
        if self.branches == "either":
            x = self.odd(x) if is_odd else self.even(x)
        elif self.branches in ("odd", "rare") and is_odd:
            x = self.odd(x) if self.branches == "odd" else self.rare(x)
        elif self.branches == "all":
            x = self.rare(self.odd(self.even(x)))
        output: Tensor = self.head(x)
        return output


class Routed:
    def __init__(self, branches: str) -> None:
        self.branches = branches

    def model(self) -> nn.Module:
        return Branching(self.branches)

    def data(self, split: str) -> Arrays:
        return Arrays(torch.arange(32) % 10, torch.arange(32) % 3)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def blocks(self, model: Any) -> list[nn.Module]:
        return [model.words, model.even, model.odd, model.rare, model.head]

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(
            nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
        )


def train(folder: Path, branches: str, stage: int) -> int:
    spec = RunSpec(
        train={"length": "6 steps", "batch": 2, "threads": 1},
        layout={"shard": 2, "zero_stage": stage},
        observe={"tensorboard": False},
    )
    with Run(spec, Routed(branches), folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
    return run.step


@pytest.mark.quick("either-'even' (even.weight, even.bias)-2", "all--2")
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("branches", "named"),
    [
        ("rare", "'rare' (rare.weight)"),
        ("odd", "'odd' (odd.weight, odd.bias)"),
        ("either", "'even' (even.weight, even.bias)"),
        ("all", ""),
    ],
)
def test_a_block_that_some_ranks_call_is_named_with_its_parameters(
    branches: str, named: str, stage: int, tmp_path: Path
) -> None:
    found = run_ranks(2, lambda rank: train(tmp_path / "run", branches, stage), tmp_path / "ranks")
    if not named:
        assert found == [6, 6]
        return
    errors = [each["error"] for each in found]
    assert all(named in each for each in errors), errors
    assert {each["code"] for each in found} == {UserCodeError.exit_code}
