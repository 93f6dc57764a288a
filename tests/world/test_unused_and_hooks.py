"""Under stages 2 and 3 a branch that only some ranks take trains as in one process.

And hooks on gradients are called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from tests.world.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("loaded_for_shards")

STEPS = 8


def stop_first_row(weight: Any) -> None:
    weight.grad[0].zero_()


class Branching(nn.Module):
    """`rare` is taken by some batches alone, `never` by none."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.words, self.rare, self.never, self.head = (
            nn.Embedding(10, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )
        if hooked:
            rows = (torch.arange(10) > 4).float()[:, None]
            self.words.weight.register_hook(lambda gradient: gradient * rows)
            self.head.weight.register_post_accumulate_grad_hook(stop_first_row)  # type: ignore[no-untyped-call]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        if int(ids[0]) > 6:
            x = x + self.rare(x)
        output: Tensor = self.head(x)
        return output


class Routed:
    def __init__(self, hooked: bool = False) -> None:
        self.hooked = hooked

    def model(self) -> nn.Module:
        return Branching(self.hooked)

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randint(0, 10, (64,), generator=draw), torch.randint(0, 3, (64,), generator=draw)
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def blocks(self, model: Any) -> list[nn.Module]:
        return [model.words, model.head]

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(
            nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
        )


def trained(folder: Path, layout: dict[str, Any], hooked: bool) -> dict[str, Any]:
    """The weights after the run, whole."""
    how = RunSpec(
        train={"length": f"{STEPS} steps", "batch": 4, "microbatch": 2, "threads": 1},
        optim={"lr": 0.02, "weight_decay": 0.1},
        layout=layout,
        observe={"tensorboard": False},
    )
    with Run(how, Routed(hooked), folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
        held: dict[str, Any] = {name: each.detach() for name, each in run.model.named_parameters()}
        whole = {
            name: each.full_tensor() if hasattr(each, "full_tensor") else each
            for name, each in held.items()
        }
        return {name: each.tolist() for name, each in whole.items()}


@pytest.mark.quick("0-True", "1-False", "3-True")
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_and_hooks_on_gradients_train_as_in_one_process(
    stage: int, hooked: bool, tmp_path: Path
) -> None:
    if stage > 1 and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("needs torch 2.13: before, FSDP2 reduces only the parameters that a rank used")
    alone = trained(tmp_path / "alone", {}, hooked)
    layout = {"shard": 2, "zero_stage": stage} if stage else {}
    found = run_ranks(2, lambda rank: trained(tmp_path / "run", layout, hooked), tmp_path / "ranks")
    assert all("error" not in each for each in found), found
    assert found[0] == found[1]
    for name, weights in alone.items():
        assert torch.allclose(torch.tensor(found[0][name]), torch.tensor(weights), atol=1e-5), name
