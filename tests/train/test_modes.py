"""The mode that model() gave each module, and weights that a forward pass changes.

An evaluation leaves both as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot import Loss, Run
from surefoot.components.data.sources.arrays import Arrays
from surefoot.train.run import drive
from tests.train.small import spec


def frozen_norm(model: nn.Sequential) -> None:
    model[1].eval()


def frozen_half(model: nn.Sequential) -> None:
    model[:3].eval()


def frozen_whole(model: nn.Sequential) -> None:
    model.eval()


SET: dict[str, tuple[Callable[[nn.Sequential], None], list[bool], str]] = {
    "as it was built": (lambda model: None, [True, True, True, True, True], ""),
    "one norm": (
        frozen_norm,
        [True, False, True, True, True],
        "1 (BatchNorm1d) stay in evaluation mode",
    ),
    "a part": (
        frozen_half,
        [False, False, False, True, True],
        "0 (Linear), 1 (BatchNorm1d), 2 (Dropout) stay in evaluation mode",
    ),
    "the whole, as from_pretrained gives it": (
        frozen_whole,
        [True] * 5,
        "model() returned the model in evaluation mode",
    ),
}


class Moded:
    def __init__(self, how: Callable[[nn.Sequential], None]) -> None:
        self.how = how

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3), nn.Dropout(0.1)
        )
        self.how(model)
        return model

    def data(self, split: str) -> Arrays:
        return Arrays(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)) + 3.0)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(output.square().sum(), count=len(output))


@pytest.mark.parametrize("kind", SET)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_each_module_is_trained_in_the_mode_that_it_was_given(
    kind: str, microbatch: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how, modes, words = SET[kind]
    seen = []
    with Run(
        spec(4, train={"microbatch": microbatch}, evaluate={"every": "2 steps"}),
        Moded(how),
        folder=tmp_path / "a",
    ) as run:
        for _ in run.steps():
            seen.append([module.training for module in run.model.children()])
            if run.evaluation_due:
                run.evaluate()
        moved = float(run.model[1].running_mean.abs().sum()) > 0  # type: ignore[index, union-attr, operator]
    assert seen == [modes] * 4
    assert moved is modes[1]
    assert words in capsys.readouterr().err


class Renormed:
    """An embedding whose lookup shortens its rows."""

    def __init__(self, kind: str, microbatch: int | None = None) -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        if self.kind == "a bag":
            return nn.Sequential(
                nn.EmbeddingBag(20, 8, max_norm=1.0, norm_type=1.0), nn.Linear(8, 3)
            )
        return nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Flatten(), nn.Linear(8, 3))

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randint(0, 20, (24, 1), generator=draw),
            torch.randint(0, 3, (24,), generator=draw),
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), count=len(output))


@pytest.mark.parametrize("kind", ["a table", "a bag"])
def test_how_often_a_run_is_evaluated_does_not_change_what_it_learns(
    kind: str, tmp_path: Path
) -> None:
    weights = []
    for every in ("1000 steps", "1 step"):
        with Run(
            spec(8, evaluate={"every": every}),
            Renormed(kind),
            folder=tmp_path / every[:4],
            quiet=True,
        ) as run:
            drive(run)
            weights.append([each.detach().clone() for each in run.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
