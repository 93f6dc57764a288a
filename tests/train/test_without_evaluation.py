"""A task without held-out data trains, and a run evaluates nothing if its spec says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot import Loss, Run, RunSpec
from surefoot.contract import events
from surefoot.core.errors import DataError, SpecError, TaskError, UnknownSplitError


class Left(Exception):
    pass


X = torch.arange(48.0).reshape(16, 3).sin()


class Fit:
    """Knows the training data alone; `held_out` is what data() does for other splits."""

    def __init__(self, held_out: str = "a dict") -> None:
        self.held_out, self.asked = held_out, list[str]()

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def data(self, split: str) -> Any:
        self.asked.append(split)
        splits = {"train": (X, X.sum(1, keepdim=True))}
        if split == "train" or self.held_out == "a dict":
            return splits[split]
        if self.held_out == "None":
            return splits.get(split)
        if self.held_out == "not implemented":
            raise NotImplementedError
        raise ValueError(f"{split} is not ready")

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0])  # type: ignore[no-any-return]

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum((output - batch[1]).square().sum(), count=len(output))


def spec_of(**tables: Any) -> RunSpec:
    train = {"length": "2 epochs", "batch": 4, "threads": 1}
    return RunSpec(train=train, observe={"tensorboard": False}, **tables)


def train(folder: Path, task: Fit, leave_at: int | None = None, **tables: Any) -> int:
    with Run(spec_of(**tables), task, folder=folder) as run:
        for report in run.steps():
            if run.evaluation_due:
                run.evaluate()
            if report.step == leave_at:
                raise Left
        return run.step


def evaluations(folder: Path) -> int:
    return sum(isinstance(event, events.Evaluated) for event in events.read(folder))


@pytest.mark.parametrize("held_out", ["a dict", "None", "not implemented"])
def test_a_task_with_training_data_alone_trains(
    held_out: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = Fit(held_out)
    assert train(tmp_path / "run", task) == 8
    told = capfd.readouterr()
    words = "task fit has no split 'test', so this run evaluates nothing"
    assert (told.out + told.err).count(words) == 1
    assert evaluations(tmp_path / "run") == 0
    model = surefoot.load(tmp_path / "run", task=Fit(held_out))
    assert isinstance(model, nn.Linear)


def test_it_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def weights(folder: Path) -> list[Tensor]:
        return list(surefoot.load(folder, task=Fit()).parameters())

    train(tmp_path / "whole", Fit())
    with pytest.raises(Left):
        train(tmp_path / "stopped", Fit(), leave_at=3, checkpoint={"every": "1 steps"})
    train(tmp_path / "stopped", Fit(), checkpoint={"every": "1 steps"})
    assert all(map(torch.equal, weights(tmp_path / "whole"), weights(tmp_path / "stopped")))


def test_never_reads_no_held_out_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = Fit("an error")
    assert train(tmp_path / "run", task, evaluate={"every": "never"}) == 8
    assert set(task.asked) == {"train"}
    assert evaluations(tmp_path / "run") == 0
    assert "evaluates nothing" not in "".join(capfd.readouterr())


def test_an_evaluation_that_is_asked_for_needs_its_data(tmp_path: Path) -> None:
    with Run(spec_of(), Fit(), folder=tmp_path / "run", quiet=True) as run:
        next(iter(run.steps()))
        assert run.evaluate("train").loss is not None
        with pytest.raises(UnknownSplitError, match="has no split 'test'") as caught:
            run.evaluate()
        assert "run.evaluate(split)" in (caught.value.hint or "")


def test_an_error_in_data_is_no_missing_split(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="test is not ready") as caught:
        train(tmp_path / "run", Fit("an error"))
    assert 'evaluate.every = "never"' in (caught.value.hint or "")


@pytest.mark.parametrize(
    "tables",
    [
        {"evaluate": {"split": "test"}},
        {"evaluate": {"split": "other"}},
        {"evaluate": {"patience": 2}},
        {"evaluate": {"score": "accuracy"}},
        {"schedule": {"name": "plateau"}},
    ],
    ids=["split", "another split", "patience", "score", "plateau"],
)
def test_a_spec_that_needs_scores_needs_held_out_data(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"has no split .* is given") as caught:
        train(tmp_path / "run", Fit(), **tables)
    assert (caught.value.hint or "").startswith("leave ")


@pytest.mark.parametrize(
    "tables",
    [
        {"evaluate": {"patience": 2}},
        {"evaluate": {"score": "accuracy"}},
        {"checkpoint": {"keep_best": 2}},
        {"schedule": {"name": "plateau"}},
    ],
    ids=["patience", "score", "best", "plateau"],
)
def test_what_depends_on_scores_is_refused_without_evaluations(tables: dict[str, Any]) -> None:
    every = {"evaluate": {**tables.get("evaluate", {}), "every": "never"}}
    with pytest.raises(SpecError, match=r"evaluate\.every"):
        RunSpec(**{**tables, **every})
