"""A run over a mixture resumes at any step, on any number of ranks, and its ledger is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import Loss, Run, RunSpec
from surefoot.components.data import consumed
from surefoot.contract import events, ledger
from surefoot.core.errors import SurefootError
from surefoot.data import Mixture
from surefoot.train.run import drive
from tests.components.test_mixture import Many, Numbers, pad
from tests.world.ranks import run_ranks


class Fit:
    def __init__(self, kind: str = "arrays", **how: Any) -> None:
        self.kind, self.how = kind, how
        self.seen: list[Any] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, split: str) -> Any:
        if self.kind == "datasets":
            return Mixture({"a": (Numbers(0, 40), 0.7), "b": (Many(1000, 6), 0.3)}, **self.how)
        rows = [torch.randn(size, 1, generator=torch.manual_seed(size)) for size in (40, 6)]
        return Mixture(
            {"a": ({"x": rows[0]}, 0.7), "b": ({"x": rows[1]}, 0.3)},
            **self.how,
        )

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"] if self.kind == "arrays" else batch[0] + batch[1]
        if model.training:
            self.seen.append(x.flatten().tolist())
        output: Tensor = model(x)
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss.sum((output - 1).square().sum(), count=len(output))


class Collated(Fit):
    def collate(self, samples: list[Any]) -> Any:
        return pad(samples)


def spec_of(**tables: Any) -> RunSpec:
    return RunSpec(
        **{
            "train": {"length": "30 steps", "batch": 4, "threads": 1, **tables.pop("train", {})},
            "optim": {"name": "sgd", "lr": 0.01},
            "checkpoint": {"every": "100 steps", "background": False},
            "observe": {"tensorboard": False, "every": "10 steps"},
            **tables,
        }
    )


def train(folder: Path, task: Fit, leave_at: int | None = None, **tables: Any) -> Any:
    with Run(spec_of(**tables), task, folder=folder, quiet=True) as run:
        task.seen.clear()
        if leave_at is None:
            drive(run)
        else:
            next(report for report in run.steps() if report.step == leave_at)
            run.save()
        return [each.tolist() for each in run.model.parameters()]


def task_of(kind: str, **how: Any) -> Fit:
    return Collated(kind, **how) if kind == "datasets" else Fit(kind, **how)


CHANGES = {11: {"a": 1, "b": 1}}


@pytest.mark.parametrize("kind", ["arrays", "datasets"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumes_at_any_step(kind: str, workers: int, tmp_path: Path) -> None:
    loader = {"loader": {"workers": workers}}
    golden = train(tmp_path / "whole", task_of(kind, changes=CHANGES))
    for leave_at in (3, 10, 11, 17, None):
        found = train(tmp_path / "parts", task_of(kind, changes=CHANGES), leave_at, **loader)
    assert found == golden
    for run in ("whole", "parts"):
        assert consumed.check(tmp_path / run).holds


@pytest.mark.parametrize("kind", ["arrays", "datasets"])
def test_ranks_and_microbatches_train_the_same(kind: str, tmp_path: Path) -> None:
    golden = train(tmp_path / "one", task_of(kind))

    def job(rank: int) -> Any:
        return train(tmp_path / "two", task_of(kind))

    found = [*run_ranks(2, job, tmp_path / "ranks")]
    found.append(train(tmp_path / "cut", task_of(kind), train={"microbatch": 2}))
    for each in found:
        torch.testing.assert_close(
            torch.tensor(each[0]), torch.tensor(golden[0]), rtol=1e-6, atol=1e-7
        )
    assert consumed.check(tmp_path / "two").holds


def test_events_tell_samples_share_and_epochs_of_each_source(tmp_path: Path) -> None:
    train(tmp_path / "run", Fit(changes=CHANGES))
    steps = [each for each in events.read(tmp_path / "run") if isinstance(each, events.Step)]
    assert steps[-1].step == 30
    told = steps[-1].sources
    assert {name: each["samples"] for name, each in told.items()} == {"a": 66, "b": 50}
    assert told["a"]["share"] == pytest.approx(66 / 116)
    assert told["b"]["epochs"] == pytest.approx(50 / 6)
    tenth = next(each for each in steps if each.step == 10).sources
    assert {name: each["samples"] for name, each in tenth.items()} == {"a": 28, "b": 12}


def test_a_dataset_draws_anew_in_each_pass(tmp_path: Path) -> None:
    task = task_of("datasets")
    train(tmp_path / "run", task)
    drawn = [value for batch in task.seen for value in batch]
    assert len(set(drawn)) == len(drawn)  # samples of b come many times, each with another number


def test_the_ledger_finds_each_use_of_a_sample(tmp_path: Path) -> None:
    train(tmp_path / "run", Fit())
    uses = consumed.find_sample(tmp_path / "run", 41)  # the second one of b
    assert len(uses) == 6  # 36 samples of the 6 in b
    assert consumed.find_sample(tmp_path / "run", 45)
    with pytest.raises(Exception, match="no sample 46"):
        consumed.find_sample(tmp_path / "run", 46)


class Thirty(Fit):
    def data(self, split: str) -> Any:
        parts = {f"language {n}": ({"x": torch.randn(1000 + n, 1)}, 1.0 + n) for n in range(30)}
        return Mixture(parts, changes={5: dict.fromkeys(parts, 1.0)})


def test_a_mixture_of_many_sources_has_a_longer_ledger_header(tmp_path: Path) -> None:
    train(tmp_path / "run", Thirty(), 7)
    assert ledger.count_header_bytes(tmp_path / "run") == 512
    train(tmp_path / "run", Thirty())
    found = consumed.check(tmp_path / "run")
    assert found.holds
    assert found.last == 30
    assert found.num_samples == 120


def test_other_weights_are_other_data(tmp_path: Path) -> None:
    train(tmp_path / "run", Fit(), 4)
    for how in ({"temperature": 2.0}, {"ends": "once"}, {"changes": CHANGES}, {"draws": True}):
        with pytest.raises(SurefootError, match="data"):
            train(tmp_path / "run", Fit(**how))
    assert consumed.check(tmp_path / "run").last == 4
