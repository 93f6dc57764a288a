"""What a metric may give: one number, of whatever type.

Anything else is refused before the first step, and every folder reads back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot import Run
from surefoot.contract.events import Evaluated
from surefoot.core.errors import TaskError
from surefoot.metrics import FromTorchmetrics, mean_of, perplexity
from surefoot.train.run import drive
from tests.train.small import Small, records, spec


class Given:
    """A metric of the user's own whose value is whatever it was given."""

    def __init__(self, given: Any, better: Any = "higher") -> None:
        self.given, self.better = given, better

    def merge(self, other: Given) -> Given:
        return self

    def value(self) -> Any:
        return self.given


class Measured(Small):
    def __init__(self, metric: Given) -> None:
        super().__init__()
        self.metric = metric

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        return {"own": self.metric}


NUMBERS = {
    "an int": 3,
    "a bool": True,
    "a float of numpy": np.float32(3),
    "an int of numpy": np.int64(3),
    "a tensor": torch.tensor(3.0),
    "one in a list of one": torch.tensor([3]),
    "an array of one": np.array([[3.0]]),
    "nothing": None,
}
REFUSED = {
    "a matrix": (torch.zeros(3, 3), r"a Tensor of shape \(3, 3\)"),
    "an array": (np.zeros(2), r"a ndarray of shape \(2,\)"),
    "a list": ([1.0, 2.0], "a list"),
    "a dict": ({"a": 1.0}, "a dict"),
    "a text": ("0.5", "a str"),
    "complex": (1j, "a complex"),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_one_number_of_any_type_is_recorded_and_read_back(kind: str, tmp_path: Path) -> None:
    with Run(spec(2), Measured(Given(NUMBERS[kind])), folder=tmp_path / "a", quiet=True) as run:
        drive(run)
    (evaluated,) = [event for event in records(tmp_path / "a") if isinstance(event, Evaluated)]
    assert evaluated.metrics["own"] == {"a bool": 1.0, "nothing": None}.get(kind, 3.0)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_value_that_is_no_number_is_refused_before_the_first_step(
    kind: str, tmp_path: Path
) -> None:
    given, words = REFUSED[kind]
    with pytest.raises(TaskError, match=f"metric 'own' of task measured returned .*{words}"):
        Run(spec(2), Measured(Given(given)), folder=tmp_path / "a", quiet=True).__enter__()
    assert not (tmp_path / "a").exists()


def test_a_direction_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="its `better` is 'max'"):
        Run(spec(2), Measured(Given(1.0, "max")), folder=tmp_path / "a", quiet=True).__enter__()


class Nameless(Small):
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def metrics(self, output: Any, batch: Any) -> Any:
        return self.given


@pytest.mark.parametrize(
    ("given", "words"),
    [(torch.tensor(0.5), "a Tensor"), ([0.5], "a list"), (None, "None"), (0.5, "a float")],
)
def test_metrics_without_names_are_refused_with_what_was_given(
    given: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=f"returned {words}, not metrics by name") as caught:
        Run(spec(2), Nameless(given), folder=tmp_path / "a", quiet=True).__enter__()
    assert "return a dict" in str(caught.value.hint)


SPREAD: dict[str, tuple[Any, str]] = {
    "total of each sample": (lambda right: mean_of(right, len(right)), r"has shape \(4,\)"),
    "count of each sample": (
        lambda right: mean_of(right.sum(), torch.ones(4)),
        r"has shape \(4,\)",
    ),
    "total of each sample and class": (
        lambda right: mean_of(right[:, None].expand(4, 3), 4),
        r"has shape \(4, 3\)",
    ),
    "nats of each token": (lambda right: perplexity(right, 4), r"has shape \(4,\)"),
}


class Spread(Small):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        return {"own": self.make((output.argmax(-1) == batch[1]).float())}


@pytest.mark.parametrize("kind", SPREAD)
def test_a_total_that_is_not_summed_is_refused_with_the_name_of_its_metric(
    kind: str, tmp_path: Path
) -> None:
    make, message = SPREAD[kind]
    with (
        pytest.raises(TaskError, match=f"metric 'own' of task spread {message}") as caught,
        Run(spec(2, evaluate={"batch": 4}), Spread(make), folder=tmp_path / "run", quiet=True),
    ):
        pass
    assert "mean_of(errors.sum(), len(errors))" in str(caught.value.hint)


class OfTorchmetrics(Small):
    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        return {"own": FromTorchmetrics(self.metric).observe(output, batch[1])}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("MulticlassF1Score", {"average": "none"}, r"metric 'own' .* of shape \(3,\)"),
        ("MulticlassAccuracy", {"average": None}, r"metric 'own' .* of shape \(3,\)"),
        ("MulticlassConfusionMatrix", {}, r"metric 'own' .* of shape \(3, 3\)"),
        ("MulticlassROC", {"thresholds": 5}, r"(?s)metric 'own' .* a tuple"),
    ],
)
def test_a_metric_of_torchmetrics_with_several_numbers_is_named(
    name: str, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kinds = pytest.importorskip("torchmetrics.classification")
    task = OfTorchmetrics(getattr(kinds, name)(3, **arguments))
    with (
        pytest.raises(TaskError, match=message) as caught,
        Run(spec(2), task, folder=tmp_path / "run", quiet=True),
    ):
        pass
    assert "return one metric for each number" in str(caught.value.hint)


def test_a_collection_of_torchmetrics_leads_to_an_entry_for_each(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    kinds = torchmetrics.classification
    collection = torchmetrics.MetricCollection(
        [kinds.MulticlassF1Score(3), kinds.MulticlassAccuracy(3)]
    )
    with (
        pytest.raises(TaskError) as caught,
        Run(spec(2), OfTorchmetrics(collection), folder=tmp_path / "run", quiet=True),
    ):
        pass
    assert "for name, each in collection.items()" in str(caught.value.hint)
