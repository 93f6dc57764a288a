"""A hook on gradients sees the mean gradient of this rank's microbatch.

It changes it as in a plain loop, and may come in the loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.arrays import Arrays
from tests.world.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("loaded_for_shards")

BATCH, STEPS, LIMIT = 8, 3, 0.02
HOW = ("register_hook", "post accumulate", "module")


class Task:
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randn(24, 4, generator=draw), torch.randint(0, 3, (24,), generator=draw)
        )

    def blocks(self, model: Any) -> list[nn.Module]:
        return [model[0], model[2]]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))


def put(model: Any, how: str, seen: list[list[float]]) -> Any:
    """A hook that notes what it sees, and clips it by its size."""

    def note(gradient: Tensor) -> Tensor:
        seen.append(gradient.detach().flatten()[:4].tolist())
        return gradient.clamp(-LIMIT, LIMIT)

    def after(parameter: Any) -> None:
        parameter.grad.copy_(note(parameter.grad))

    if how == "register_hook":
        return model[0].weight.register_hook(note)
    if how == "post accumulate":
        return model[0].weight.register_post_accumulate_grad_hook(after)
    return model[2].register_full_backward_hook(
        lambda module, into, out: tuple(None if each is None else note(each) for each in into)
    )


def spec(microbatch: int | None, layout: dict[str, Any]) -> RunSpec:
    return RunSpec(
        train={"length": f"{STEPS} steps", "batch": BATCH, "microbatch": microbatch, "threads": 1},
        layout=layout,
        data={"shuffle": False},
        optim={"name": "sgd", "momentum": 0.0, "lr": 0.5, "weight_decay": 0.0, "clip": 0.0},
        schedule={"name": "constant"},
        observe={"tensorboard": False},
        evaluate={"every": "99 steps"},
    )


def train(folder: Path, how: str, stated: RunSpec, *, in_loop: bool = False) -> dict[str, Any]:
    seen: list[list[float]] = []
    task = Task()
    if not in_loop:
        make = task.model
        task.model = lambda: (lambda model: (put(model, how, seen), model)[1])(make())  # type: ignore[method-assign]
    handle = None
    with Run(stated, task, folder=folder, quiet=True) as run:
        seen.clear()  # of the checks before the run
        for report in run.steps():
            if in_loop and report.step == 1:
                handle = put(run.model, how, seen)
            if in_loop and report.step == 2 and handle is not None:
                handle.remove()
        held: dict[str, Any] = {name: each.detach() for name, each in run.model.named_parameters()}
        whole = {
            name: each.full_tensor() if hasattr(each, "full_tensor") else each
            for name, each in held.items()
        }
        return {"seen": seen, "weights": {name: each.tolist() for name, each in whole.items()}}


def plain(how: str, rank: int, num_parts: int, *, in_loop: bool = False) -> dict[str, Any]:
    """A plain loop over the parts of each batch, each with its mean loss.

    What the hook sees of part `rank` alone.
    """
    task, seen = Task(), []  # type: Task, list[list[float]]
    model, data = task.model(), task.data("train")
    parameters = list(model.parameters())
    found: list[list[float]] = []
    for step in range(STEPS):
        total = [torch.zeros_like(each) for each in parameters]
        handle = put(model, how, seen) if not in_loop or step == 1 else None
        for part in range(num_parts):
            size = BATCH // num_parts
            ids = torch.arange(BATCH * step + part * size, BATCH * step + (part + 1) * size).numpy()
            batch = data.read(ids)
            model.zero_grad()
            seen.clear()
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            found += seen if part == rank else []
            for into, each in zip(total, parameters, strict=True):
                assert each.grad is not None
                into += each.grad / num_parts
        if handle is not None:
            handle.remove()
        with torch.no_grad():
            for each, gradient in zip(parameters, total, strict=True):
                each -= 0.5 * gradient
    return {
        "seen": found,
        "weights": {name: each.tolist() for name, each in model.named_parameters()},
    }


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["seen"]) == len(expected["seen"])
    torch.testing.assert_close(
        torch.tensor(found["seen"]), torch.tensor(expected["seen"]), rtol=1e-4, atol=1e-6
    )
    for name, weights in expected["weights"].items():
        torch.testing.assert_close(
            torch.tensor(found["weights"][name]), torch.tensor(weights), rtol=1e-4, atol=1e-6
        )


@pytest.mark.quick("0-True", "3-False")
@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_hook_on_a_rank_sees_and_changes_the_mean_gradient_of_its_microbatch(
    stage: int, in_loop: bool, tmp_path: Path
) -> None:
    layout = {"shard": 2, "zero_stage": stage} if stage else {}

    def job(rank: int) -> Any:
        return {how: train(tmp_path / how, how, spec(None, layout), in_loop=in_loop) for how in HOW}

    for rank, found in enumerate(run_ranks(2, job, tmp_path / "ranks")):
        assert "error" not in found, found
        for how in HOW:
            assert_alike(found[how], plain(how, rank, 2, in_loop=in_loop))


@pytest.mark.parametrize("how", ["register_hook", "module"])
def test_a_hook_sees_the_mean_gradient_of_each_microbatch_of_one_process(
    how: str, tmp_path: Path
) -> None:
    found = train(tmp_path / "run", how, spec(2, {}))
    expected = [plain(how, part, 4) for part in range(4)]
    assert_alike({**found, "seen": found["seen"][::4]}, expected[0])
    assert_alike({**found, "seen": found["seen"][3::4]}, expected[3])
