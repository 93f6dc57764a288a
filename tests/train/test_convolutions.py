"""train.cudnn_benchmark: on where it may be, off with its reason elsewhere.

It is ended where batches have many shapes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.train import environment
from surefoot.train.run import Run
from tests.train.small import Small, spec

TIMED: dict[str, Any] = {"cudnn_benchmark": True, "deterministic": False}


class Lengths(Small):
    """24 batches of one sample, each cut to a length of its own, or all to the same."""

    def __init__(self, *, many: bool) -> None:
        super().__init__()
        self.many = many

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(4, 8, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3)
        )

    def data(self, split: str) -> Arrays:
        return Arrays(torch.randn(24, 4, 32), torch.arange(24) % 3, torch.arange(24) + 8)

    def augment(self, batch: Any, keys: Any) -> Any:
        return batch[0][:, :, : int(batch[2][0]) if self.many else 8], batch[1], batch[2]


@pytest.mark.parametrize(
    ("tables", "device", "words"),
    [
        ({"train": {"cudnn_benchmark": True}}, "cpu", "cuDNN runs only on GPUs"),
        (
            {"train": {"cudnn_benchmark": True}},
            "cuda",
            "train.deterministic does not allow a choice by measured time",
        ),
        (
            {"train": {**TIMED, "batch": 8, "ramp": ((0, 4), (16, 8))}},
            "cuda",
            "train.ramp has several batch sizes",
        ),
        ({"train": TIMED}, "cuda", None),
        ({}, "cpu", None),
    ],
)
def test_where_it_may_not_be_it_is_off_with_its_reason(
    tables: dict[str, Any], device: str, words: str | None
) -> None:
    told = environment.describe_cudnn(RunSpec(**tables), device)
    assert (words in told[0]) if words is not None else (told == [])


def test_a_run_on_a_cpu_says_that_it_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(spec(1, train={"cudnn_benchmark": True, "device": "cpu"}), Small(), folder=tmp_path):
        assert not torch.backends.cudnn.benchmark
    said = capsys.readouterr()
    assert "train.cudnn_benchmark has no effect: cuDNN runs only on GPUs" in said.out + said.err


@pytest.mark.parametrize("many", [True, False])
def test_batches_of_many_shapes_end_the_search_and_those_of_one_do_not(
    many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The switch is torch's own, which is there without a GPU, too."""
    monkeypatch.setattr(environment, "why_not_timed", lambda spec, device: None)
    on = []
    with Run(spec(14, train={**TIMED, "batch": 1}), Lengths(many=many), folder=tmp_path) as run:
        for _ in run.steps():
            on.append(torch.backends.cudnn.benchmark)  # noqa: PERF401 - while the run goes on
    assert on == ([True] * 9 + [False] * 5 if many else [True] * 14)
    assert not torch.backends.cudnn.benchmark
    said = capsys.readouterr()
    assert (
        "step 10: train.cudnn_benchmark is off from this step on: batches had 9 shapes"
        in said.out + said.err
    ) is many


class Convolutions(Small):
    """Images that a few layers of convolutions see."""

    def model(self) -> nn.Module:
        layers = [
            nn.Sequential(nn.Conv2d(3 if not n else 64, 64, 3, padding=1), nn.ReLU())
            for n in range(6)
        ]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3))

    def data(self, split: str) -> Arrays:
        return Arrays(torch.randn(64, 3, 64, 64), torch.arange(64) % 3)

    def augment(self, batch: Any, keys: Any) -> Any:
        return batch


@pytest.mark.gpu
def test_the_first_step_takes_longer_and_later_ones_do_not(tmp_path: Path) -> None:
    took: dict[bool, list[float]] = {}
    for number, timed in enumerate((False, False, True)):  # the first one starts CUDA and cuDNN
        took[timed] = []
        table = {"batch": 32, "cudnn_benchmark": timed, "deterministic": False}
        with Run(
            spec(40, train=table), Convolutions(), folder=tmp_path / str(number), quiet=True
        ) as run:
            begun_s = time.perf_counter()
            for _ in run.steps():
                torch.cuda.synchronize()
                took[timed].append(time.perf_counter() - begun_s)
                begun_s = time.perf_counter()
    first, later = (
        {timed: pick(took[timed]) for timed in took}
        for pick in (lambda each: each[0], lambda each: sorted(each[20:])[10])
    )
    print(
        f"first step {first[False]:.4f} s, timed {first[True]:.4f} s; "
        f"later {later[False]:.5f} s, timed {later[True]:.5f} s"
    )
    assert first[True] > first[False]
    assert later[True] < 1.1 * later[False]
