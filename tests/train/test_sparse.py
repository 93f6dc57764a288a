"""Sparse gradients of embeddings: what torch's optimizers take, a task's own optimizer takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.optim.update import GuardedUpdate
from surefoot.core.errors import SpecError, TaskError
from tests.train.small import spec
from tests.world.ranks import run_ranks

STEPS, WORDS = 6, 12
Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.5),
    "sgd with momentum": lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "sparse adam": lambda groups: torch.optim.SparseAdam(groups, lr=0.05),
}


class Left(Exception):
    """The loop is left."""


class Words:
    """Scores of words that are rows of one table; most rows are in no batch of a step."""

    def __init__(self, make: Make | None) -> None:
        if make is not None:
            self.optimizer = lambda groups: make(
                [{**group, "weight_decay": 0.0} for group in groups]
            )

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(WORDS, 3, sparse=True)

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randint(0, WORDS, (24,), generator=draw),
            torch.randint(0, 3, (24,), generator=draw),
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))


def how(clip: float = 0.0, **tables: Any) -> RunSpec:
    train = {"batch": 4, "threads": 1, **tables.pop("train", {})}
    return spec(
        STEPS,
        optim={"clip": clip},
        schedule={"name": "constant"},
        train=train,
        data={"shuffle": False},
        checkpoint={"every": "2 steps", "background": False},
        **tables,
    )


def train(
    folder: Path, name: str | None, stated: RunSpec, leave_at: int | None = None
) -> tuple[Tensor, dict[str, str]]:
    with Run(stated, Words(MAKERS[name] if name else None), folder=folder, quiet=True) as run:
        for report in run.steps():
            if report.step == leave_at:
                raise Left
        return run.model.weight.detach().clone(), run.state_digests()


def plain_loop(name: str, clip: float) -> Tensor:
    """The same training without surefoot."""
    task = Words(None)
    model, data = task.model(), task.data("train")
    optimizer = MAKERS[name](model.parameters())
    for step in range(STEPS):
        batch = data.read(torch.arange(4 * step, 4 * step + 4).numpy())
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        weight.grad = weight.grad.coalesce()
        norm = torch.linalg.vector_norm(weight.grad.to_dense())
        if clip:
            weight.grad._values().mul_((clip / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
    return next(model.parameters()).detach()


@pytest.mark.quick("adagrad-0.05", "sgd with momentum-0.0", "sparse adam-0.05")
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("name", MAKERS)
def test_a_tasks_own_optimizer_takes_sparse_gradients_as_in_a_plain_loop(
    name: str, clip: float, tmp_path: Path
) -> None:
    expected = plain_loop(name, clip)
    whole, digests = train(tmp_path / "whole", name, how(clip))
    torch.testing.assert_close(whole, expected)
    parts, _ = train(tmp_path / "parts", name, how(clip, train={"microbatch": 2}))
    torch.testing.assert_close(parts, expected)
    with contextlib.suppress(Left):
        train(tmp_path / "left", name, how(clip), leave_at=3)
    again, of_again = train(tmp_path / "left", name, how(clip))
    assert torch.equal(again, whole)
    assert of_again == digests


@pytest.mark.quick("sgd with momentum", "adagrad")
@pytest.mark.parametrize("name", MAKERS)
def test_two_ranks_train_sparse_gradients_as_one_process(name: str, tmp_path: Path) -> None:
    expected = plain_loop(name, 0.0)
    found = run_ranks(
        2, lambda rank: train(tmp_path / "run", name, how())[0].tolist(), tmp_path / "ranks"
    )
    assert all(isinstance(each, list) for each in found), found
    assert found[0] == found[1]
    torch.testing.assert_close(torch.tensor(found[0]), expected)


def test_a_row_that_only_another_rank_has_is_moved_by_sparse_adam_and_one_that_none_has_is_left(
    tmp_path: Path,
) -> None:
    def job(rank: int) -> Any:
        return train(tmp_path / "run", "sparse adam", how(train={"batch": 2}))[0].tolist()

    start = Words(None).model().weight.detach()
    (found, _) = run_ranks(2, job, tmp_path / "ranks")
    moved = (torch.tensor(found) != start).any(1)
    used = torch.zeros(WORDS, dtype=torch.bool)
    used[Words(None).data("train").read(torch.arange(2 * STEPS).numpy())[0]] = True
    assert torch.equal(moved, used)


@pytest.mark.parametrize(
    ("layout", "name", "says"),
    [
        ({}, None, r"the optimizers of \[optim\] need dense gradients"),
        (
            {"virtual_ranks": 2},
            "sgd",
            (
                r"layout\.virtual_ranks is given, "
                r"but the gradient of an embedding with sparse=True is sparse"
            ),
        ),
    ],
)
def test_what_does_not_take_them_is_refused_before_step_1(
    layout: dict[str, Any], name: str | None, says: str, tmp_path: Path
) -> None:
    with pytest.raises((SpecError, TaskError), match=says):
        train(tmp_path / "run", name, how(layout=layout, train={"microbatch": 2}))
    assert not (tmp_path / "run").exists()


def test_the_norm_and_the_clipped_values_are_those_of_the_dense_gradient() -> None:
    table, dense = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2)
    dense.load_state_dict(table.state_dict())
    ids = torch.tensor([1, 1, 3])
    updates = [
        GuardedUpdate([torch.optim.SGD(each.parameters(), lr=0.1)], clip_value=0.5)
        for each in (table, dense)
    ]
    for each in (table, dense):
        each(ids).square().sum().backward()
    assert float(updates[0].norm()) == pytest.approx(float(updates[1].norm()))
    norms = [update.step_if_finite() for update in updates]
    assert norms[0][0] == pytest.approx(norms[1][0])
    torch.testing.assert_close(table.weight, dense.weight)
