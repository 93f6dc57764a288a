"""Parametrizations and hooks of modules train under every layout as in a plain loop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from surefoot import Loss, Run, RunSpec, load
from surefoot.components.checkpoint.export import export_weights
from surefoot.components.data.sources.arrays import Arrays
from tests.world.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("loaded_for_shards")

BATCH, STEPS, LR, EMA = 8, 4, 0.2, 0.9
SAVED: dict[str, Any] = {"checkpoint": {"every": "2 steps", "background": False}}
EVERYTHING: dict[str, Any] = {
    **SAVED,
    "memory": {"activation_checkpointing": "full"},
    "optim": {"ema": EMA, "ema_ramp": False},
}
NARROW: dict[str, Any] = {"precision": {"weights": "bf16", "compute": "bf16"}}


class Symmetric(nn.Module):
    """A parametrization of one's own, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))  # FSDP2 takes no scalar

    def forward(self, weight: Tensor) -> Tensor:
        return self.scale * (weight + weight.flip(0)) / 2


def forward_hook(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, given, output: output.clamp(-0.5, 0.5))


def forward_pre_hook(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))


def backward_hook(layer: nn.Module) -> None:
    def halve(module: nn.Module, into: Any, out: Any) -> Any:
        return tuple(None if each is None else each * 0.5 for each in into)

    layer.register_full_backward_hook(halve)


def backward_pre_hook(layer: nn.Module) -> None:
    layer.register_full_backward_pre_hook(lambda module, out: tuple(each * 0.5 for each in out))


PUT: dict[str, Callable[[Any], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    "forward hook": forward_hook,
    "forward pre-hook": forward_pre_hook,
    "backward hook": backward_hook,
    "backward pre-hook": backward_pre_hook,
}
LAYERS = {"inner": 2, "last": 4}


class Task:
    def __init__(self, put: str, layer: str) -> None:
        self.put, self.layer = PUT[put], LAYERS[layer]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.put(model[self.layer])
        return model

    def data(self, split: str) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randn(32, 4, generator=draw), torch.randint(0, 4, (32,), generator=draw)
        )

    def blocks(self, model: Any) -> list[nn.Module]:
        return [model[0], model[2], model[4]]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))


def spec(layout: dict[str, Any], **tables: Any) -> RunSpec:
    given: dict[str, Any] = {
        "train": {"length": f"{STEPS} steps", "batch": BATCH, "threads": 1},
        "layout": layout,
        "data": {"shuffle": False},
        "optim": {"name": "sgd", "momentum": 0.9, "lr": LR, "weight_decay": 0.0, "clip": 0.0},
        "schedule": {"name": "constant"},
        "observe": {"tensorboard": False},
        "evaluate": {"every": "99 steps"},
    }
    return RunSpec(
        **{name: {**given.get(name, {}), **tables.get(name, {})} for name in given | tables}
    )


def whole(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).tolist()
        for name, each in state.items()
    }


class Left(Exception):
    """Leaves a run as a kill would: nothing is saved on the way out."""


def train(folder: Path, task: Task, given: RunSpec, *, leave_at: int | None = None) -> Any:
    """The state dict after the run, whole; None for a run that was left."""
    with contextlib.suppress(Left), Run(given, task, folder=folder, quiet=True) as run:
        for report in run.steps():
            if report.step == leave_at:
                raise Left
        return whole(run.model.state_dict())
    return None


def train_killed(folder: Path, task: Task, given: RunSpec) -> Any:
    """The same of a run that was killed at step 3 and resumed from step 2."""
    train(folder, task, given, leave_at=3)
    return train(folder, task, given)


def plain(task: Task, num_parts: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dict of a plain loop, and the averages of its parameters."""
    model, data, size = task.model(), task.data("train"), BATCH // num_parts
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    averages = {name: each.detach().clone() for name, each in model.named_parameters()}
    for start in range(0, BATCH * STEPS, BATCH):
        optimizer.zero_grad()
        for part in range(num_parts):
            rows = torch.arange(start + part * size, start + (part + 1) * size)
            inputs, labels = data.read(rows.numpy())
            (F.cross_entropy(model(inputs), labels) / num_parts).backward()
        optimizer.step()
        for name, each in model.named_parameters():
            averages[name].lerp_(each.detach(), 1 - EMA)
    return whole(model.state_dict()), whole(averages)


def assert_alike(
    found: dict[str, Any], expected: dict[str, Any], *, about: float = 1e-5, rtol: float = 1e-4
) -> None:
    assert found.keys() >= expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(
            torch.tensor(found[name]), torch.tensor(values), rtol=rtol, atol=about
        )


def layout_of(stage: int) -> dict[str, Any]:
    return {"shard": 2, "zero_stage": stage} if stage else {}


@pytest.mark.quick("2-last")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_put_on_a_layer_trains_under_every_stage_as_in_a_plain_loop(
    stage: int, layer: str, tmp_path: Path
) -> None:
    given = spec(layout_of(stage))

    def job(rank: int) -> Any:
        return {put: train(tmp_path / put, Task(put, layer), given) for put in PUT}

    for found in run_ranks(2, job, tmp_path / "ranks"):
        assert "error" not in found, found
        for put in PUT:
            expected, _ = plain(Task(put, layer))
            assert_alike(found[put], expected)
            assert list(found[put]) == list(expected)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_averaged_recomputed_killed_and_loaded_under_every_stage_as_in_a_plain_loop(
    stage: int, layer: str, tmp_path: Path
) -> None:
    given = spec(layout_of(stage), **EVERYTHING)

    def job(rank: int) -> Any:
        return {put: train_killed(tmp_path / put, Task(put, layer), given) for put in PUT}

    for found in run_ranks(2, job, tmp_path / "ranks"):
        assert "error" not in found, found
        for put in PUT:
            expected, averages = plain(Task(put, layer))
            assert_alike(found[put], expected)
            stored = load(tmp_path / put, STEPS, task=Task(put, layer)).state_dict()
            assert_alike(whole(stored), averages)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])  # stage 1 takes no weights in bf16
def test_it_trains_with_weights_in_bf16_under_every_stage(stage: int, tmp_path: Path) -> None:
    given = spec(layout_of(stage), **NARROW, **SAVED)

    def job(rank: int) -> Any:
        return {put: train_killed(tmp_path / put, Task(put, "last"), given) for put in PUT}

    for found in run_ranks(2, job, tmp_path / "ranks"):
        assert "error" not in found, found
        for put in PUT:
            assert_alike(found[put], plain(Task(put, "last"))[0], about=0.01, rtol=0.02)


@pytest.mark.quick("spectral_norm-last", "old spectral_norm-inner", "orthogonal-inner")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("put", PUT)
def test_it_trains_with_weights_in_bf16_and_resumes_to_the_same_bits(
    put: str, layer: str, tmp_path: Path
) -> None:
    given, task = spec({}, **NARROW, **SAVED), Task(put, layer)
    unbroken = train(tmp_path / "unbroken", task, given)
    assert_alike(unbroken, plain(task)[0], about=0.01, rtol=0.02)
    assert train_killed(tmp_path / "killed", task, given) == unbroken
    loaded = load(tmp_path / "killed", STEPS, task=task).state_dict()
    assert {each.dtype for each in loaded.values()} == {torch.float32}


@pytest.mark.quick("spectral_norm-last")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("put", PUT)
def test_it_is_cut_into_microbatches_as_in_a_plain_loop_and_its_export_is_loaded_strictly(
    put: str, layer: str, tmp_path: Path
) -> None:
    task = Task(put, layer)
    train(tmp_path / "run", task, spec({}, train={"microbatch": BATCH // 2}))
    model = load(tmp_path / "run", STEPS, task=task)
    inputs, _ = task.data("train").read(torch.arange(4).numpy())
    made = export_weights(model, task.model, lambda each: each(inputs), tmp_path / "w.safetensors")
    assert made.holds
    fresh = task.model()
    fresh.load_state_dict(load_file(tmp_path / "w.safetensors"), strict=True)
    assert_alike(whole(fresh.state_dict()), plain(task, 2)[0])
