"""Losses that compare the samples of all ranks with each other, and fixed terms.

Ranks train to the weights of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core.errors import TaskError
from surefoot.runtime.comm.gathered import Gathering
from surefoot.runtime.comm.group import Group
from surefoot.train.run import Run
from tests.train.test_fixed_terms import Fixed, penalty
from tests.world.ranks import run_ranks, together


class Pairs:
    """Two views of each sample, recognized among those of the whole batch.

    `how` says what the loss of a rank sums.
    """

    def __init__(self, how: str = "all rows", num_samples: int = 48) -> None:
        self.how, self.num_samples = how, num_samples

    def model(self) -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def data(self, split: str) -> Arrays:
        draws = torch.Generator().manual_seed(1)
        return Arrays(
            x=torch.randn(self.num_samples, 6, generator=draws, dtype=torch.float64),
            number=torch.arange(self.num_samples),
        )

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = model(batch["x"]), model(batch["x"] + 0.1)
        return F.normalize(first, dim=-1), F.normalize(second, dim=-1)

    def loss(self, output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Loss:
        one, other = output
        if self.how == "own negatives":
            return self.add_up(one, other, torch.arange(len(one)), additive=False)
        others = surefoot.all_gather(other)
        if self.how == "all rows":
            one = surefoot.all_gather(one)
            return self.add_up(one, others, torch.arange(len(one)), additive=False)
        numbers = surefoot.all_gather(batch["number"])
        own = (batch["number"][:, None] == numbers).long().argmax(1)
        return self.add_up(one, others, own, additive=False)

    @staticmethod
    def add_up(one: Tensor, other: Tensor, own: Tensor, *, additive: bool) -> Loss:
        return Loss.sum(
            F.cross_entropy(one @ other.T / 0.1, own, reduction="sum"), len(one), additive=additive
        )


class Counted(Pairs):
    def counts(self, batch: dict[str, Tensor]) -> int:
        return len(batch["x"])


def train(task: Any, folder: Path, **train: Any) -> dict[str, Any]:
    spec = RunSpec(
        train={"length": "4 steps", "batch": 16, "threads": 1, **train},
        optim={"lr": 0.05},
        observe={"tensorboard": False},
        evaluate={"split": "train"},
    )
    with Run(spec, task, folder=folder, quiet=True) as run:
        losses = [float(report.loss or 0.0) for report in run.steps()]
        run.evaluate()
        return {
            "losses": losses,
            "weights": {name: each.tolist() for name, each in run.model.state_dict().items()},
        }


def assert_same(found: list[Any], expected: dict[str, Any]) -> None:
    for each in found:
        assert "error" not in each, each
        torch.testing.assert_close(each["losses"], expected["losses"], rtol=1e-9, atol=1e-12)
        for name, values in expected["weights"].items():
            torch.testing.assert_close(
                torch.tensor(each["weights"][name]), torch.tensor(values), rtol=1e-6, atol=1e-7
            )


@pytest.mark.quick("all-3", "counted-2")
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "task",
    [Pairs("all rows"), Pairs("own rows"), Counted("own rows")],
    ids=["all", "own", "counted"],
)
def test_a_loss_over_gathered_rows_trains_as_one_process_does(
    task: Pairs, num_ranks: int, tmp_path: Path
) -> None:
    expected = train(task, tmp_path / "one")
    assert_same(
        run_ranks(num_ranks, lambda rank: train(task, tmp_path / "ranks"), tmp_path / "results"),
        expected,
    )


def test_a_fixed_term_counts_once_a_step_on_ranks(tmp_path: Path) -> None:
    expected = train(Fixed(penalty), tmp_path / "one")
    assert_same(
        run_ranks(3, lambda rank: train(Fixed(penalty), tmp_path / "ranks"), tmp_path / "results"),
        expected,
    )
    assert_same(
        run_ranks(
            2, lambda rank: train(Fixed(penalty), tmp_path / "cut", microbatch=2), tmp_path / "more"
        ),
        expected,
    )


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "not gathered": (Pairs("own negatives"), {}, "is not additive and cannot be split"),
    "with microbatches": (
        Pairs("all rows"),
        {"microbatch": 4},
        "is not additive and cannot be split",
    ),
    "a rank without a part": (
        Pairs("all rows", num_samples=33),
        {},
        "a batch of 1 cannot be divided among 2 ranks",
    ),
    "counted otherwise": (
        Counted("all rows"),
        {},
        "counts(batch) returns 16 on all ranks for the term loss, whose loss counts 32",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_ranks_cannot_gather_is_refused_on_all_of_them(what: str, tmp_path: Path) -> None:
    task, settings, words = REFUSED[what]
    for each in run_ranks(
        2, lambda rank: train(task, tmp_path / "ranks", **settings), tmp_path / "results"
    ):
        assert words in each["error"]


def test_rows_of_unlike_numbers_are_gathered_with_the_sum_of_all_gradients(tmp_path: Path) -> None:
    def job(group: Group) -> Any:
        rows = torch.full((group.rank + 1, 2), float(group.rank), requires_grad=True)
        with Gathering(group):
            found = surefoot.all_gather(rows)
        (found * (group.rank + 1) * torch.arange(6.0)[:, None]).sum().backward()  # type: ignore[no-untyped-call]
        assert rows.grad is not None
        return [found[:, 0].tolist(), rows.grad[:, 0].tolist()]

    found = together(3, job, tmp_path)
    assert [rows for rows, _ in found] == [[0.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 3
    assert [grads for _, grads in found] == [[0.0], [6.0, 12.0], [18.0, 24.0, 30.0]]


def test_one_process_gathers_the_tensor_as_it_is() -> None:
    rows = torch.ones(2, 3)
    assert surefoot.all_gather(rows) is rows


def test_a_loss_that_may_not_be_divided_names_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="not additive") as raised:
        train(Pairs("own negatives"), tmp_path / "run", microbatch=4)
    assert "leave train.microbatch out" in str(raised.value.hint)
    assert "surefoot.all_gather" in str(raised.value.hint)
