"""Ranks that hold rows, and what looks at more than a number.

Weights gathered in 16 bits, rules that move whole layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.task import Loss
from surefoot.core.flight import Kind
from surefoot.train.run import Run
from tests.world.ranks import run_ranks
from tests.world.test_run import apart, spec
from tests.world.test_shard import LAYOUTS, Stacked, final_weights, followed, worst

pytestmark = pytest.mark.usefixtures("loaded_for_shards")


@pytest.mark.quick("lars-stage 3 on 2")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("lamb", "stage 1 on 3"),
        ("lars", "stage 3 on 2"),
        pytest.param("lamb", "stage 2 on 2", marks=pytest.mark.slow),
    ],
)
def test_rules_that_look_at_whole_layers_are_told_their_norms(
    name: str, layout: str, tmp_path: Path
) -> None:
    num_ranks, axes = LAYOUTS[layout]
    tables: Any = {
        "optim": {"name": name, "lr": 0.5 if name == "lars" else 0.02, "weight_decay": 0.1},
        "train": {"length": "5 steps"},
    }
    alone = followed(tmp_path / "alone", spec(**tables))
    found = run_ranks(
        num_ranks,
        lambda rank: followed(tmp_path / "run", spec(layout=axes, **tables)),
        tmp_path / "ranks",
    )
    assert all("losses" in each for each in found), found
    assert max(apart(alone, each) for each in found) < 1e-10
    assert worst(final_weights(tmp_path / "run", 5), final_weights(tmp_path / "alone", 5)) < 1e-10


class Narrow(Stacked):
    def model(self) -> nn.Module:
        return super().model().float().requires_grad_()


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_gathered_in_bf16_are_summed_and_moved_in_fp32(stage: int, tmp_path: Path) -> None:
    """But for those of norms.

    What is sent to gather them halves, and the losses are those of one process that stores them in
    bf16.
    """

    def job(rank: int, weights: str, layout: dict[str, Any]) -> Any:
        given = spec(
            layout=layout,
            precision={"compute": "bf16", "weights": weights},
            checkpoint={"every": "never"},
            train={"length": "4 steps"},
        )
        with Run(given, Narrow(), folder=tmp_path / f"{weights}-{len(layout)}", quiet=True) as run:
            losses = [report.loss for report in run.steps()]
            ranks, record = (
                run.assembly.engine.steps.collectives.ranks,
                run.assembly.engine.steps.record.found,
            )
            sent = (
                0
                if ranks is None or ranks.sharded is None
                else ranks.sharded.group.traffic[Kind.GATHER]
            )
        assert record is not None
        seen = {
            each.name: [each.storage, each.compute, each.gradient, each.reduce, each.master]
            for each in record.parameters
        }
        return {"losses": losses, "sent": sent, "seen": seen}

    def on_two(weights: str) -> Any:
        return run_ranks(
            2,
            lambda rank: job(rank, weights, {"shard": 2, "zero_stage": stage}),
            tmp_path / f"ranks-{weights}",
        )

    narrow, wide, alone = on_two("bf16"), on_two("fp32"), job(0, "bf16", {})
    assert all("losses" in each for each in (*narrow, *wide)), (narrow, wide)
    assert narrow[0]["losses"] == narrow[1]["losses"]
    assert narrow[0]["losses"] == pytest.approx(alone["losses"], rel=5e-3)
    assert 0.45 <= narrow[0]["sent"] / wide[0]["sent"] <= 0.62  # the norm's go as they are
    assert narrow[0]["seen"]["blocks.0.inner.0.weight"] == ["fp32", "bf16", "bf16", "fp32", "fp32"]
    assert narrow[0]["seen"]["norm.weight"][2:] == ["fp32", "fp32", "fp32"]
    assert wide[0]["seen"]["blocks.0.inner.0.weight"] == ["fp32", "bf16", "fp32", "fp32", "fp32"]


class Small64:
    """A weight whose gradient is 1 for the first sample and 2^-9 for each of 63 others.

    bf16 would lose those on the way.
    """

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 2, bias=False))

    def data(self, split: str) -> Any:
        return Arrays(x=torch.tensor([[1.0]] + 63 * [[2.0**-9]]))

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        made: Tensor = model(batch["x"])
        return made

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        return Loss.sum(output.float().sum(), 1)


def test_64_small_gradients_in_bf16_are_summed_without_loss(tmp_path: Path) -> None:
    def job(rank: int) -> Any:
        given = spec(
            layout={"shard": 2, "zero_stage": 2},
            precision={"compute": "bf16", "weights": "bf16"},
            optim={"clip": 0.0, "name": "sgd"},
            train={"length": "1 steps", "batch": 64, "microbatch": 1},
            checkpoint={"every": "never"},
        )
        with Run(given, Small64(), folder=tmp_path / "run", quiet=True) as run:
            return [report.gradient_norm for report in run.steps()]

    whole = 1.0 + 63 * 2.0**-9
    for found in run_ranks(2, job, tmp_path / "ranks"):
        assert found == pytest.approx([2**0.5 * whole / 64 * 1.0], rel=1e-6), found
    added = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(63):
        added += 2.0**-9
    assert float(added) == 1.0  # what a sum in bf16 gives
