"""A small part of a loss that is no sum over samples is found; rounding is no such part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss, Term
from surefoot.core.errors import TaskError
from surefoot.train.run import Run

Parts = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Classes:
    """A classifier of 10 classes whose loss is made by `of`, from the model, logits and labels."""

    def __init__(self, of: Callable[[nn.Module, Tensor, Tensor], Loss], width: int = 64) -> None:
        self.of, self.width = of, width

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, self.width), nn.ReLU(), nn.Linear(self.width, 10))

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(1)
        return Arrays(torch.randn(32, 16, generator=draws), torch.arange(32) % 10)

    def forward(self, model: nn.Module, batch: Any) -> tuple[nn.Module, Tensor]:
        return model, model(batch[0])

    def loss(self, output: tuple[nn.Module, Tensor], batch: Any) -> Loss:
        return self.of(*output, batch[1])


def with_added(added: Parts) -> Callable[[nn.Module, Tensor, Tensor], Loss]:
    def made(model: nn.Module, logits: Tensor, labels: Tensor) -> Loss:
        total = F.cross_entropy(logits, labels, reduction="sum")
        return Loss.sum(total + added(model, logits, labels), len(labels))

    return made


def squares(model: nn.Module) -> Tensor:
    return torch.stack([each.square().sum() for each in model.parameters()]).sum()


SMALL: dict[str, Parts] = {
    "a penalty on weights": lambda model, logits, labels: 1e-4 * squares(model),
    "a smaller one": lambda model, logits, labels: 1e-5 * squares(model),
    "a sparse one": lambda model, logits, labels: (
        1e-5 * torch.stack([each.abs().sum() for each in model.parameters()]).sum()
    ),
    "a mean over the batch": lambda model, logits, labels: 0.1 * logits.square().mean(),
    "an orthogonal one": lambda model, logits, labels: (
        1e-4 * (model[2].weight @ model[2].weight.T - torch.eye(10)).square().sum()  # type: ignore[index,operator]
    ),
    "a reward": lambda model, logits, labels: -1e-4 * squares(model),
}
SUMS: dict[str, Parts] = {
    "a penalty of each sample": lambda model, logits, labels: 1e-4 * squares(model) * len(labels),
    "a small sum": lambda model, logits, labels: 1e-4 * logits.square().sum(),
    "a large sum": lambda model, logits, labels: 1e6 * logits.square().sum(),
    "in sixteen bits": lambda model, logits, labels: logits.bfloat16().square().sum().float(),
    "cancelling": lambda model, logits, labels: 1e3 * logits.sum() - 1e3 * logits.flip(1).sum(),
}


def prepare(task: Classes, folder: Path, **train: Any) -> list[str]:
    spec = RunSpec(
        train={"length": "1 step", "batch": 8, "threads": 1, **train},
        observe={"tensorboard": False},
    )
    with Run(spec, task, folder=folder, quiet=True) as run:
        return [note for note in run.assembly.warnings if " a sum" in note]


@pytest.mark.parametrize("what", SMALL)
def test_a_small_part_that_is_added_once_a_batch_is_refused_with_microbatches(
    what: str, tmp_path: Path
) -> None:
    task = Classes(with_added(SMALL[what]))
    with pytest.raises(TaskError, match="is not a sum over samples") as refused:
        prepare(task, tmp_path / "run", microbatch=4)
    assert "fixed=True" in str(refused.value.hint)


def test_it_is_reported_where_batches_stay_whole(tmp_path: Path) -> None:
    (note,) = prepare(Classes(with_added(SMALL["a smaller one"])), tmp_path / "run")
    assert "is not a sum over samples" in note


@pytest.mark.parametrize("what", SUMS)
def test_rounding_is_not_taken_for_a_penalty(what: str, tmp_path: Path) -> None:
    assert prepare(Classes(with_added(SUMS[what]), 512), tmp_path / "run", microbatch=4) == []


def test_a_penalty_in_a_fixed_term_is_taken(tmp_path: Path) -> None:
    def apart(model: nn.Module, logits: Tensor, labels: Tensor) -> Loss:
        return Loss(
            Term("nll", F.cross_entropy(logits, labels, reduction="sum"), len(labels)),
            Term("penalty", 1e-4 * squares(model), 1, fixed=True),
        )

    class Counted(Classes):
        def counts(self, batch: Any) -> dict[str, int]:
            return {"nll": len(batch[1])}

    assert prepare(Counted(apart), tmp_path / "run", microbatch=4) == []
