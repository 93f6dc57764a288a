"""A run evaluates several splits, each at its interval; the first one decides the score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.contract import events
from surefoot.core.errors import DataError, SpecError
from surefoot.metrics import Mean
from surefoot.train.run import drive
from tests.train.test_loader_resume import Left

X = torch.arange(48.0).reshape(16, 3).sin()


class Fit:
    def __init__(self, breaks: str = "") -> None:
        self.breaks, self.read = breaks, list[str]()

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def data(self, split: str) -> Any:
        self.read.append(split)
        shift = {"train": 0.0, "test": 0.0, "code": 2.0, "other": 4.0}[split]
        return X, X.sum(1, keepdim=True) + shift, torch.full((16,), shift)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0])  # type: ignore[no-any-return]

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum((output - batch[1]).square().sum(), count=len(output))

    def metrics(self, output: Tensor, batch: Any) -> Any:
        if self.breaks and batch[2][0] == 2.0:
            raise RuntimeError(self.breaks)
        return {"error": Mean((output - batch[1]).abs().sum(), len(output))}


def spec_of(steps: int = 16, **evaluate: Any) -> RunSpec:
    return RunSpec(
        train={"length": f"{steps} steps", "batch": 4, "threads": 1},
        evaluate=evaluate,
        checkpoint={"every": "1 steps", "background": False},
        observe={"tensorboard": False},
    )


def train(folder: Path, spec: RunSpec, task: Fit | None = None) -> None:
    with Run(spec, task or Fit(), folder=folder, quiet=True) as run:
        drive(run)


def evaluated(folder: Path) -> list[tuple[str, int]]:
    found = [each for each in events.read(folder) if isinstance(each, events.Evaluated)]
    return [(each.split, each.step) for each in found]


def test_each_split_has_its_interval(tmp_path: Path) -> None:
    spec = spec_of(split=["test", "code", "other"], every=["5 steps", "1 epoch", "7 steps"])
    train(tmp_path / "run", spec)
    assert evaluated(tmp_path / "run") == [
        ("code", 4),
        ("test", 5),
        ("other", 7),
        ("code", 8),
        ("test", 10),
        ("code", 12),
        ("other", 14),
        ("test", 15),
        ("test", 16),
        ("code", 16),
        ("other", 16),
    ]


def test_one_interval_is_that_of_all(tmp_path: Path) -> None:
    train(tmp_path / "run", spec_of(8, split=["test", "code"]))
    assert evaluated(tmp_path / "run") == [("test", 4), ("code", 4), ("test", 8), ("code", 8)]


def test_the_first_split_decides(tmp_path: Path) -> None:
    train(tmp_path / "run", spec_of(split=["code", "test"]))
    found = [each for each in events.read(tmp_path / "run") if isinstance(each, events.Evaluated)]
    assert {each.split for each in found if each.best} == {"code"}
    train(tmp_path / "alone", spec_of(split="code"))
    scores = [each.metrics for each in found if each.split == "code"]
    alone = [each for each in events.read(tmp_path / "alone") if isinstance(each, events.Evaluated)]
    assert scores == [each.metrics for each in alone]


def test_early_stopping_names_the_split(tmp_path: Path) -> None:
    spec = spec_of(40, split=["test", "code"], patience=2).replace(optim={"lr": 0.0})
    train(tmp_path / "run", spec)
    ended = [each for each in events.read(tmp_path / "run") if isinstance(each, events.Ended)]
    assert ended[-1].cause == "no better test error in 2 evaluations"


def test_a_resumed_run_goes_on_with_them(tmp_path: Path) -> None:
    spec = spec_of(split=["test", "code"], every=["3 steps", "4 steps"])
    train(tmp_path / "whole", spec)
    with (
        pytest.raises(Left),
        Run(spec, Fit(), folder=tmp_path / "stopped", quiet=True) as run,
    ):
        for report in run.steps():
            for split in run.splits_due:
                run.evaluate(split)
            if report.step == 6:
                raise Left
    train(tmp_path / "stopped", spec)
    # step 6 was not saved, and is done again
    again = evaluated(tmp_path / "stopped")
    assert sorted(set(again)) == sorted(evaluated(tmp_path / "whole"))


def test_a_run_that_ends_early_evaluates_what_is_left(tmp_path: Path) -> None:
    with Run(
        spec_of(split=["test", "code"], every="100 steps"),
        Fit(),
        folder=tmp_path / "run",
        quiet=True,
    ) as run:
        for report in run.steps():
            assert not run.evaluation_due
            if report.step == 3:
                run.stop("enough")
                run.evaluate("code")
        assert run.splits_left == ("test",)


def test_each_split_is_tried_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="'code' before the run failed"):
        train(tmp_path / "run", spec_of(split=["test", "code"]), Fit("no code"))
    with pytest.raises(DataError, match="has no split 'none'"):
        train(tmp_path / "none", spec_of(split=["test", "none"]))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"split": []}, "names no split"),
        ({"split": ["test", "test"]}, "one of them twice"),
        ({"split": ["test", ""]}, "names no split"),
        ({"split": ["test", "code"], "every": ["1 epoch"]}, "1 intervals for 2 splits"),
        ({"every": ["1 epoch", "2 epochs"]}, "2 intervals for 1 splits"),
        ({"split": ["test", "code"], "every": ["1 epoch", "never"]}, "never"),
        ({"every": "5 parsecs"}, "parsecs"),
    ],
    ids=["none", "twice", "empty", "too few", "too many", "never", "a bad one"],
)
def test_splits_that_make_no_sense_are_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        RunSpec(evaluate=table)
