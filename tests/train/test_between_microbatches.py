"""State that a microbatch leaves to the next one is reported before step 1.

It is if microbatches train to other weights through it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.events import Started
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.train.run import Run
from tests.train.small import records

ROWS = 8


class Recurrent(nn.Module):
    """A cell that is given the state that the batch before has left, kept as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.cell = how, nn.RNNCell(2, 4)
        self.table: Tensor | None = None
        if how == "buffer":
            self.register_buffer("kept", torch.zeros(1, 4))
        else:
            self.kept: Any = (
                [torch.zeros(1, 4)]
                if how == "list"
                else torch.zeros(ROWS if how == "rows" else 1, 4)
            )

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        if self.how == "table":
            self.table = torch.ones(1, 4)
            return self.cell(x, self.table.expand(len(x), 4))
        if self.how == "rows":
            out = self.cell(x, self.kept[row])
            self.kept[row] = out.detach()
            return out
        before = (self.kept[0] if self.how == "list" else self.kept).clone()
        out = self.cell(
            x, before if len(before) == len(x) else before.mean(0, keepdim=True).expand(len(x), 4)
        )
        if self.how == "attribute":
            self.kept = out.detach()
        elif self.how == "list":
            self.kept = [out.detach()]
        elif self.how in ("buffer", "task"):
            self.kept.copy_(out.detach().mean(0, keepdim=True))
        return out


class Streams:
    def __init__(self, how: str) -> None:
        self.how, self.baseline = how, torch.zeros(())
        self.generator = torch.Generator().manual_seed(1)

    def model(self) -> nn.Module:
        self.net = Recurrent(self.how)
        return self.net

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(0)
        return Arrays(
            x=torch.randn(4 * ROWS, 2, generator=draws), row=torch.arange(4 * ROWS) % ROWS
        )

    def state(self) -> dict[str, Any]:
        held = {
            "task": {"kept": self.net.kept},
            "baseline": {"mean": self.baseline},
            "generator": {"draws": self.generator},
        }
        return held.get(self.how, {})

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output: Tensor = model(batch["x"], batch["row"])
        return output

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        total = output.square().sum()
        if self.how == "baseline":
            total = (output - self.baseline).square().sum()
            self.baseline.lerp_(output.detach().mean(), 0.5)
        if self.how == "generator":
            total = (
                total + 1e-3 * (output * torch.randn(output.shape, generator=self.generator)).sum()
            )
        return Loss.sum(total, len(output))


def find_warnings(how: str, folder: Path, **train: Any) -> list[str]:
    spec = RunSpec(
        train={"length": "1 steps", "batch": ROWS, **train},
        data={"shuffle": False},
        evaluate={"every": "9 epochs"},
        observe={"tensorboard": False},
    )
    with Run(spec, Streams(how), folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
    started = records(folder)[0]
    assert isinstance(started, Started)
    return [note for note in started.notes if "depends on the previous microbatch" in note]


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("attribute", "attributes/kept"),
        ("list", "attributes/kept"),
        ("buffer", "buffers/kept"),
        ("task", "state/kept"),
        ("baseline", "state/mean"),
    ],
)
def test_state_that_goes_from_a_microbatch_to_the_next_is_reported(
    how: str, name: str, tmp_path: Path
) -> None:
    (note,) = find_warnings(how, tmp_path / "run", microbatch=ROWS // 2)
    assert name in note


@pytest.mark.parametrize("how", ["rows", "table", "generator"])
def test_state_of_each_row_tables_and_generators_are_no_reason_to_report(
    how: str, tmp_path: Path
) -> None:
    assert find_warnings(how, tmp_path / "run", microbatch=ROWS // 2) == []


def test_a_whole_batch_may_carry_state_to_the_next(tmp_path: Path) -> None:
    assert find_warnings("attribute", tmp_path / "run") == []
