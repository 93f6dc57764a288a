"""train.memory_format: filters channels last compute what they did.

And a run goes on with what the optimizer keeps of them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components import checkpoint
from surefoot.components.compiler.layout import lay_channels_last
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.optim.update import GuardedUpdate
from surefoot.core.errors import RunFolderError, SpecError
from surefoot.train.run import Run
from tests.train.small import Small, spec

LAST = torch.channels_last
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optim": {"name": "sgd", "lr": 0.05}},
    "adamw": {"optim": {"name": "adamw", "lr": 0.01, "ema": 0.5}},
    "not fused": {"optim": {"name": "adamw", "lr": 0.01, "fused": False}},
    "muon": {"optim": {"name": "muon", "lr": 0.01}},
    "lars": {"optim": {"name": "lars", "lr": 1.0}},
    "lamb": {"optim": {"name": "lamb", "lr": 0.01}},
    "in backward": {
        "optim": {"clip": 0.0, "lr": 0.01},
        "memory": {"update_in_backward": True},
        "stability": {"nonfinite": "stop"},
    },
    "microbatches": {"optim": {"lr": 0.01}, "train": {"microbatch": 2}},
    "clipped by value": {"optim": {"lr": 0.01, "clip": 0.0, "clip_value": 0.01}},
}


class Images(Small):
    """Small images that two convolutions see, channels last by the task itself if `own`."""

    def __init__(self, *, own: bool = False) -> None:
        super().__init__()
        self.own = own

    def model(self) -> nn.Module:
        made = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 6, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(54, 3),
        )
        return made.to(memory_format=LAST) if self.own else made  # type: ignore[call-overload, no-any-return]

    def data(self, split: str) -> Arrays:
        generator = torch.Generator().manual_seed(int(split == "train"))
        return Arrays(torch.randn(24, 3, 8, 8, generator=generator), torch.arange(24) % 3)

    def augment(self, batch: Any, keys: Any) -> Any:
        return batch


def train(
    folder: Path, steps: int, task: Small | None = None, **tables: Any
) -> tuple[list[Tensor], Run]:
    """The weights after 8 steps, or after fewer, with which the run is left as by Ctrl-C."""
    weights: list[Tensor] = []
    run = Run(
        spec(8, **{**tables, "checkpoint": {"every": "1 step"}}),
        task or Images(),
        folder=folder,
        quiet=True,
    )
    with contextlib.suppress(KeyboardInterrupt), run:
        for report in run.steps():
            weights = [each.detach().clone() for each in run.model.parameters()]
            if report.step == steps < 8:
                raise KeyboardInterrupt
    return weights, run


def joined(tables: dict[str, Any]) -> dict[str, Any]:
    return {**tables, "train": {**tables.get("train", {}), "memory_format": "channels_last"}}


@pytest.mark.quick("lamb")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_filters_channels_last_train_to_the_same_weights_and_go_on_to_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    plain, _ = train(tmp_path / "plain", 8, **OPTIMIZERS[name])
    last, run = train(tmp_path / "last", 8, **joined(OPTIMIZERS[name]))
    for mine, theirs in zip(last, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    filters = [each for each in run.model.parameters() if each.ndim == 4]
    assert all(
        each.is_contiguous(memory_format=LAST) and not each.is_contiguous() for each in filters
    )
    train(tmp_path / "left", 4, **joined(OPTIMIZERS[name]))
    resumed, _ = train(tmp_path / "left", 8, **joined(OPTIMIZERS[name]))
    assert not (tmp_path / "left-1").exists()  # it went on
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(resumed, last, strict=True))


@pytest.mark.quick("adamw")
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_task_whose_own_model_is_channels_last_goes_on_to_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    whole, _ = train(tmp_path / "whole", 8, Images(own=True), **OPTIMIZERS[name])
    train(tmp_path / "left", 4, Images(own=True), **OPTIMIZERS[name])
    resumed, _ = train(tmp_path / "left", 8, Images(own=True), **OPTIMIZERS[name])
    assert not (tmp_path / "left-1").exists()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(resumed, whole, strict=True))


@pytest.mark.parametrize("how", ["fused", "not fused", "guarded"])
def test_a_loop_of_ones_own_goes_on_with_filters_channels_last(how: str, tmp_path: Path) -> None:
    """A file holds moments row by row.

    A fused kernel goes through weights and moments in the order of the memory.
    """

    def begin() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Images(own=True).model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=how != "not fused")
        return model, GuardedUpdate([optimizer]) if how == "guarded" else optimizer

    def step(model: nn.Module, update: Any, number: int) -> None:
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        model.zero_grad()
        F.cross_entropy(model(images), torch.arange(4) % 3).backward()
        update.step_if_finite() if how == "guarded" else update.step()

    whole = begin()
    for number in range(6):
        step(*whole, number)
        if number == 2:
            checkpoint.save(tmp_path, 3, {"model": whole[0], "optimizer": whole[1]})
    later = begin()
    checkpoint.load(tmp_path, {"model": later[0], "optimizer": later[1]})
    for number in range(3, 6):
        step(*later, number)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(later[0].parameters(), whole[0].parameters(), strict=True)
    )


def test_the_run_says_what_lies_channels_last_and_what_cannot(tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {
            "flat": nn.Conv1d(2, 2, 3),
            "image": nn.Conv2d(2, 2, 3),
            "volume": nn.ConvTranspose3d(2, 4, 3),
        }
    )
    notes = lay_channels_last(model)
    assert notes == [
        "channels last (train.memory_format): 2 of the model's tensors",
        "unchanged, since channels last does not exist for 1-D convolutions: flat",
    ]
    assert model["volume"].weight.is_contiguous(memory_format=torch.channels_last_3d)
    _, run = train(tmp_path, 1, **joined({}))
    assert "channels last (train.memory_format): 2 of the model's tensors" in run.assembly.notes


def test_a_model_without_convolutions_is_refused_and_so_is_another_layout_for_a_run_that_goes_on(
    tmp_path: Path,
) -> None:
    with pytest.raises(SpecError, match="no tensor of four or five dimensions"):
        train(tmp_path / "none", 1, Small(), **joined({}))
    train(tmp_path / "run", 2)
    with pytest.raises(RunFolderError, match="the run of a different spec"):
        train(tmp_path / "run", 4, **joined({}))


def test_precision_and_moments_in_few_bits_go_with_it(tmp_path: Path) -> None:
    narrow = {"precision": {"compute": "bf16", "weights": "bf16"}, "optim": {"lr": 0.01}}
    plain, _ = train(tmp_path / "plain", 4, **narrow)
    last, run = train(tmp_path / "last", 4, **joined(narrow))
    assert all(
        torch.allclose(mine, theirs, atol=0.02) for mine, theirs in zip(last, plain, strict=True)
    )
    assert all(
        each.is_contiguous(memory_format=LAST) for each in run.model.parameters() if each.ndim == 4
    )
