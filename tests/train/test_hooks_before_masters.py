"""A hook on an accumulated gradient sees it before it moves to the master, or is freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.optim.masters import keep_on_host
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.state import master_of
from surefoot.contract.task import Loss
from surefoot.train.run import Run
from tests.train.small import spec
from tests.world.ranks import run_ranks

SAMPLES, BATCH, STEPS = 24, 8, 3
BF16 = {"precision": {"compute": "bf16", "weights": "bf16"}}
IN_BACKWARD = {"memory": {"update_in_backward": True}, "stability": {"nonfinite": "stop"}}


class Task:
    """A layer with a hook on its weight, which may be registered in the loop."""

    def __init__(self, seen: list[Tensor], *, in_model: bool) -> None:
        self.seen, self.in_model = seen, in_model

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        if self.in_model:
            self.put(model)
        return model

    def put(self, model: Any) -> Any:
        def note(weight: Any) -> None:
            self.seen.append(weight.grad.detach().clone().float())
            weight.grad[0].zero_()

        return model[0].weight.register_post_accumulate_grad_hook(note)

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randn(SAMPLES, 4, generator=draw),
            torch.randint(0, 3, (SAMPLES,), generator=draw),
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))


def train(
    folder: Path, tables: dict[str, Any], microbatch: int | None, *, in_model: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """What the hook sees from step 2 on, and the weight before and after these steps."""
    seen: list[Tensor] = []
    task = Task(seen, in_model=in_model)
    stated = spec(
        STEPS,
        train={"batch": BATCH, "microbatch": microbatch, "threads": 1},
        data={"shuffle": False},
        optim={"name": "sgd", "momentum": 0.0, "lr": 1e-2, "weight_decay": 0.0, "clip": 0.0},
        schedule={"name": "constant"},
        **tables,
    )
    weights = []
    with Run(stated, task, folder=folder, quiet=True) as run:
        model: Any = run.model
        for report in run.steps():
            weights.append(model[0].weight.detach().clone())
            if report.step == 1:
                seen.clear()
                if not in_model:
                    task.put(model)
    return seen, weights


def plain(microbatch: int, tables: dict[str, Any]) -> list[Tensor]:
    """The mean gradients of the microbatches of steps 2 and 3; the learning rate is small."""
    seen: list[Tensor] = []
    task = Task(seen, in_model=True)
    model: Any = task.model()
    batch = task.data("train").read(torch.arange(SAMPLES).numpy())
    dtype = torch.bfloat16 if tables is BF16 else torch.float32
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(each.to(dtype))
    for start in range(BATCH, SAMPLES, microbatch):
        model.zero_grad()
        part = slice(start, start + microbatch)
        F.cross_entropy(model(batch[0][part]), batch[1][part]).backward()
    return seen


def assert_alike(found: list[Tensor], expected: list[Tensor], coarse: float) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= coarse * other.norm()


def assert_stopped(weights: list[Tensor]) -> None:
    """The row that the hook stops stays, and the others move."""
    assert torch.equal(weights[0][0], weights[-1][0])
    assert not torch.equal(weights[0][1:], weights[-1][1:])


@pytest.mark.parametrize("in_model", [True, False], ids=["in the model", "in the loop"])
@pytest.mark.parametrize("microbatch", [None, 4, 2])
def test_a_hook_sees_the_mean_gradient_of_each_microbatch(
    microbatch: int | None, in_model: bool, tmp_path: Path
) -> None:
    found, weights = train(tmp_path / "run", BF16, microbatch, in_model=in_model)
    assert_alike(found, plain(microbatch or BATCH, BF16), 0.05)
    assert_stopped(weights)


@pytest.mark.parametrize("in_model", [True, False], ids=["in the model", "in the loop"])
def test_a_hook_on_a_rank_sees_the_mean_gradient_of_its_microbatch(
    in_model: bool, tmp_path: Path
) -> None:
    def job(rank: int) -> Any:
        found, weights = train(tmp_path / "run", BF16, None, in_model=in_model)
        return [[each.tolist() for each in row] for row in (found, weights)]

    expected = plain(BATCH // 2, BF16)
    for rank, done in enumerate(run_ranks(2, job, tmp_path / "ranks")):
        assert "error" not in done, done
        found, weights = ([torch.tensor(each) for each in row] for row in done)
        assert_alike(found, expected[rank::2], 0.05)
        assert_stopped(weights)


@pytest.mark.parametrize("in_model", [True, False], ids=["in the model", "in the loop"])
def test_a_hook_sees_a_gradient_before_the_host_copies_it(in_model: bool) -> None:
    seen: list[Tensor] = []
    task = Task(seen, in_model=in_model)
    model: Any = task.model()
    keep_on_host(model)
    masters = [master_of(each) for each in model.parameters()]
    update = GuardedUpdate([torch.optim.SGD(masters, lr=0.1)])
    if not in_model:
        task.put(model)
    for _ in range(2):
        update.clear_gradients()
        model(torch.ones(2, 4)).square().sum().backward()
        update.step_if_finite()
    assert len(seen) == 2
    assert all(each.any() for each in seen)
    assert not masters[0].grad[0].any()  # type: ignore[index]


@pytest.mark.parametrize("in_model", [True, False], ids=["in the model", "in the loop"])
def test_a_hook_sees_a_gradient_before_the_update_in_the_backward_pass_frees_it(
    in_model: bool, tmp_path: Path
) -> None:
    found, weights = train(tmp_path / "run", IN_BACKWARD, None, in_model=in_model)
    assert_alike(found, plain(BATCH, IN_BACKWARD), 0.02)
    assert_stopped(weights)
