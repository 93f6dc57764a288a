"""The trial evaluation before a run merges two batches, and checks the names and the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot import Run
from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.metrics import FromTorchmetrics, accuracy
from surefoot.contract.events import Evaluated
from surefoot.core.errors import TaskError
from surefoot.train.run import drive
from tests.train.small import SAMPLES, Small, records, spec

torchmetrics = pytest.importorskip("torchmetrics")


class Counted:
    """A metric of the user's own whose `merge` does as `how` says."""

    better = "higher"

    def __init__(self, how: str, total: float) -> None:
        self.how, self.total = how, total

    def merge(self, other: Counted) -> Any:
        if self.how == "raises":
            raise KeyError("total")
        if self.how == "returns a number":
            return self.total + other.total
        self.total += other.total
        return self if self.how == "works" else None

    def value(self) -> float:
        return self.total


class Measured(Small):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.of = of

    def metrics(self, output: Tensor, batch: Any) -> Any:
        return self.of(output, batch[1])


def prepare(of: Any, folder: Path) -> None:
    Run(spec(2), Measured(of), folder=folder, quiet=True).__enter__()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "KeyError: 'total'"),
        ("returns None", r"merge\(\) of metric 'own' of task measured returned None"),
        ("returns a number", r"merge\(\) of metric 'own' .* returned .*int.*, not a metric"),
    ],
)
def test_a_merge_that_fails_is_refused_before_the_first_step(
    how: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=words):
        prepare(lambda output, labels: {"own": Counted(how, len(labels))}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [0, None, ("a", "b"), 0.5, b"a"], ids=repr)
def test_a_name_that_is_no_text_is_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=f"names a metric .*, a {type(name).__name__}") as refused:
        prepare(lambda output, labels: {name: accuracy(output, labels)}, tmp_path / "run")
    assert "use a text as its name" in str(refused.value.hint)


KINDS: dict[str, Any] = {
    "accuracy": lambda: torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
    "f1": lambda: torchmetrics.classification.MulticlassF1Score(3),
    "auroc": lambda: torchmetrics.classification.MulticlassAUROC(3),
    "calibration": lambda: torchmetrics.classification.MulticlassCalibrationError(3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_of_torchmetrics_has_the_value_of_the_whole_split(
    kind: str, tmp_path: Path
) -> None:
    metric = FromTorchmetrics(KINDS[kind]())
    task = Measured(lambda output, labels: {kind: metric.observe(output.softmax(1), labels)})
    with Run(spec(2), task, folder=tmp_path / "run", quiet=True) as run:
        drive(run)
        model = run.model.eval()
    (evaluated,) = [each for each in records(tmp_path / "run") if isinstance(each, Evaluated)]
    whole = task.data("test").read(torch.arange(SAMPLES).numpy())
    with torch.no_grad():
        expected = KINDS[kind]()(model(whole[0]).softmax(1), whole[1])
    assert evaluated.metrics[kind] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("MulticlassConfusionMatrix", r"a Tensor of shape \(3, 3\); a score must be one number"),
        ("MulticlassROC", "a tuple; a score must be one number"),
    ],
)
def test_a_metric_of_torchmetrics_that_is_no_number_is_refused_with_what_to_do(
    kind: str, words: str, tmp_path: Path
) -> None:
    metric = FromTorchmetrics(getattr(torchmetrics.classification, kind)(3))
    with pytest.raises(TaskError, match=words) as refused:
        prepare(
            lambda output, labels: {"own": metric.observe(output.softmax(1), labels)},
            tmp_path / "run",
        )
    assert "return one metric for each number" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("num_samples", "batch", "sizes"),
    [(5, 32, [5]), (12, 32, [8]), (16, 32, [8, 8]), (12, 8, [8, 4]), (6, 4, [4, 2])],
)
def test_a_trial_has_two_batches_where_the_run_has_them(
    num_samples: int, batch: int, sizes: list[int], tmp_path: Path
) -> None:
    seen = []

    class Short(Small):
        def data(self, split: str) -> Arrays:
            return Arrays(torch.randn(num_samples, 4), torch.zeros(num_samples, dtype=torch.int64))

        def metrics(self, output: Tensor, batch: Any) -> Any:
            seen.append(len(output))
            return super().metrics(output, batch)

    table = spec(2, train={"batch": 4}, evaluate={"batch": batch})
    with Run(table, Short(), folder=tmp_path / "run", quiet=True):
        assert seen == sizes
