"""A term that does not depend on the batch counts once a step, however the batch is divided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss, Term
from surefoot.core.errors import TaskError
from surefoot.train.run import Run


def penalty(model: nn.Module) -> tuple[Tensor, float]:
    return torch.stack([each.abs().sum() for each in model.parameters()]).sum(), 1


def edges(model: nn.Module) -> tuple[Tensor, float]:
    return model(torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)).square().sum(), 2


def divergence(model: nn.Module) -> tuple[Tensor, float]:
    """Of a Gaussian posterior of the weights from a unit Gaussian."""
    return torch.stack([0.5 * each.square().sum() for each in model.parameters()]).sum(), 24


def orthogonality(model: nn.Module) -> tuple[Tensor, float]:
    weight: Any = model.get_submodule("0").weight
    return (weight.T @ weight - torch.eye(2, dtype=torch.float64)).square().sum(), 1


FIXED = [penalty, edges, divergence, orthogonality]


class Fixed:
    def __init__(
        self,
        of: Callable[[nn.Module], tuple[Tensor, float]],
        *,
        marked: bool = True,
        counted: bool = True,
    ) -> None:
        self.of, self.marked = of, marked
        if counted:
            self.counts = lambda batch: {"squares": len(batch["x"])}

    def model(self) -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    def data(self, split: str) -> Arrays:
        return Arrays(
            x=torch.randn(22, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        )

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return model(batch["x"]), self.of(model)

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Loss:
        found, (total, count) = output
        squares = Term("squares", (found[:, 0] - batch["x"].sum(1)).square().sum(), len(found))
        return Loss(squares, Term("fixed", total, count, weight=0.1, fixed=self.marked))  # type: ignore[arg-type]


def train(task: Fixed, folder: Path, **train: Any) -> tuple[list[float], dict[str, Tensor]]:
    spec = RunSpec(
        train={"length": "5 steps", "batch": 16, "threads": 1, **train},
        optim={"lr": 0.05},
        observe={"tensorboard": False},
    )
    with Run(spec, task, folder=folder, quiet=True) as run:
        losses = [float(report.loss or 0.0) for report in run.steps()]
        return losses, {name: each.clone() for name, each in run.model.state_dict().items()}


@pytest.mark.quick("penalty-4", "edges-1", "divergence-8", "orthogonality-4")
@pytest.mark.parametrize("microbatch", [8, 4, 1])
@pytest.mark.parametrize("of", FIXED, ids=lambda of: of.__name__)
def test_a_fixed_term_counts_once_a_step(of: Any, microbatch: int, tmp_path: Path) -> None:
    losses, weights = train(Fixed(of), tmp_path / "whole")
    torch.testing.assert_close(
        train(Fixed(of), tmp_path / "split", microbatch=microbatch),
        (losses, weights),
        rtol=1e-9,
        atol=1e-12,
    )
    # one microbatch a step: it may be any term
    plain = train(Fixed(of, marked=False, counted=False), tmp_path / "plain")
    torch.testing.assert_close(plain, (losses, weights), rtol=0, atol=0)


def test_a_fixed_term_beside_a_count_that_is_not_known_names_the_term_that_needs_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        TaskError, match="counts that are not known before the forward pass"
    ) as raised:
        train(Fixed(penalty, counted=False), tmp_path / "split", microbatch=4)
    assert "(of squares)" in str(raised.value.hint)
