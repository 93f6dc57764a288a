"""Checks before a run whose batches come divided from a DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from surefoot import Run, RunSpec
from surefoot.core.errors import TaskError
from tests.train.test_loader_resume import BATCH, NUMBERS, Task


class Normed(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def texts(samples: list[Any]) -> Tensor:
    """Pads to the longest, at the end."""
    rows = [torch.full((1 + number % 5,), value + 1) for value, number in samples]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def masked(samples: list[Any]) -> Tensor:
    """Draws which values are masked."""
    found = torch.tensor([value for value, _ in samples])
    return torch.where(torch.rand(len(found)) < 0.3, -1.0, found)


def centered(samples: list[Any]) -> Tensor:
    found = torch.tensor([value for value, _ in samples])
    return found - found.mean()


def packed(samples: list[Any]) -> Tensor:
    """Rows of two values, of whatever sample."""
    return torch.cat([torch.full((1 + number % 3,), value) for value, number in samples])[:6]


@pytest.mark.parametrize(
    ("collate", "is_named"),
    [
        (None, False),
        (texts, False),
        (lambda samples: texts(samples).flip(1), False),
        (masked, False),
        (lambda samples: [torch.tensor([value]) for value, _ in samples], False),
        (centered, True),
        (packed, True),
    ],
    ids=["default", "padded", "padded left", "random", "list", "centered", "packed"],
)
def test_a_collate_function_that_depends_on_the_other_samples_is_named(
    collate: Any, is_named: bool, tmp_path: Path
) -> None:
    class Summed(Task):
        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            batch = batch[0] if collate is None else batch
            rows = [each.float().sum().reshape(1, 1) / 100 for each in batch]
            return model(torch.cat(rows))  # type: ignore[no-any-return]

    loader = DataLoader(NUMBERS, BATCH, shuffle=True, collate_fn=collate)
    spec = RunSpec(train={"length": "1 steps", "microbatch": 2}, observe={"tensorboard": False})
    with Run(spec, Summed(loader), folder=tmp_path / "run", quiet=True) as run:
        told = [each for each in run.assembly.warnings if "the collate function" in each]
    assert bool(told) is is_named


@pytest.mark.parametrize(("num_samples", "drop_last"), [(9, False), (9, True), (10, False)])
def test_a_norm_that_needs_several_samples_is_refused_a_microbatch_of_one(
    num_samples: int, drop_last: bool, tmp_path: Path
) -> None:
    loader = DataLoader(NUMBERS[:num_samples], BATCH, drop_last=drop_last)
    spec = RunSpec(train={"length": "1 steps", "microbatch": 2}, observe={"tensorboard": False})
    run = Run(spec, Normed(loader), folder=tmp_path / "run", quiet=True)
    if num_samples == 9 and not drop_last:
        with pytest.raises(TaskError, match="a microbatch of the DataLoader has one sample"), run:
            pass
        return
    with run:
        assert len(list(run.steps())) == 1


@pytest.mark.parametrize("virtual", [True, False])
def test_a_norm_is_measured_on_the_microbatches_that_a_small_batch_has(
    virtual: bool, tmp_path: Path
) -> None:
    loader = DataLoader(NUMBERS[:6], 6 if virtual else 50)
    how: dict[str, Any] = (
        {"layout": {"virtual_ranks": 4}, "train": {"threads": 1}}
        if virtual
        else {"train": {"microbatch": 2}}
    )
    spec = RunSpec(
        **{**how, "train": {**how["train"], "length": "2 steps"}}, observe={"tensorboard": False}
    )
    with Run(spec, Normed(loader), folder=tmp_path / "run", quiet=True) as run:
        assert any(
            "a microbatch of 2 samples, not the batch of 6" in each
            for each in run.assembly.warnings
        )
        assert len(list(run.steps())) == 2
