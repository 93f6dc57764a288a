"""Results of the batches of an evaluation, and their merging in the order of the batches."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surefoot.components.metrics import BitsPerByte, Mean, Perplexity
from surefoot.contract.task import Batch, Metric, Output, ResolvedTask
from surefoot.runtime.comm.group import Group

# metrics with a total and a count, which are sent as text
PLAIN: dict[str, Any] = {kind.__name__: kind for kind in (Mean, Perplexity, BitsPerByte)}
Number = Tensor | float
Term = tuple[str, Number, Number, float]


class BatchResult(NamedTuple):
    """Result of one batch: sample count, loss terms (name, total, count, weight) and metrics."""

    num_samples: int
    terms: tuple[Term, ...]
    metrics: Mapping[str, Metric]


class Merged:
    """Sums of the samples, loss terms (each with its weight) and metrics of all results so far."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.terms: dict[str, tuple[Mean, float]] = {}
        self.metrics: dict[str, Metric] = {}

    def add(self, part: BatchResult) -> None:
        self.num_samples += part.num_samples
        for name, total, count, weight in part.terms:
            mean = Mean(total, count, "lower")
            self.terms[name] = (
                mean if name not in self.terms else self.terms[name][0].merge(mean),
                weight,
            )
        for name, metric in part.metrics.items():
            self.metrics[name] = (
                self.metrics[name].merge(metric) if name in self.metrics else metric
            )


def gather(
    mine: Sequence[BatchResult], group: Group, *, can_share: bool = True
) -> list[BatchResult] | None:
    """Return the results of all ranks in the order of the batches.

    Of n ranks, each has every n-th batch. A rank rebuilds the metrics of other ranks with the
    classes of its own metrics; a rank without a batch knows only the classes of surefoot. Returns
    None if a metric holds values that cannot be sent as text, if a class is not known, or if a rank
    passes `can_share` as false.
    """
    is_plain = all(is_sendable(metric) for part in mine for metric in part.metrics.values())
    if group.most([float(not (is_plain and can_share))])[0]:
        return None
    known = PLAIN | {
        _name_of(metric): type(metric) for part in mine for metric in part.metrics.values()
    }
    rows = [
        json.loads(text) for text in group.exchange(json.dumps([_as_row(part) for part in mine]))
    ]
    kinds = {kind for each in rows for row in each for kind, _ in row[2].values()}
    if not kinds <= PLAIN.keys() and group.most([float(not kinds <= known.keys())])[0]:
        return None
    return [
        _from_row(rows[number % group.size][number // group.size], known)
        for number in range(sum(map(len, rows)))
    ]


def is_sendable(metric: Metric) -> bool:
    """Return whether other ranks can rebuild `metric` from tensors, numbers and text."""
    if type(metric) in PLAIN.values():
        return True
    slots = any(vars(kind).get("__slots__") for kind in type(metric).__mro__)
    values = getattr(metric, "__dict__", {}).values()
    return not slots and all(
        (isinstance(each, Tensor) and each.layout == torch.strided)
        or isinstance(each, float | int | str | None)
        for each in values
    )


def watch(task: ResolvedTask, unshared: set[str]) -> ResolvedTask:
    """Return the task with a `metrics` that adds names of unsendable metrics to `unshared`."""
    if task.metrics is None:
        return task
    give = task.metrics

    def metrics(output: Output, inputs: Batch) -> Mapping[str, Metric]:
        found = give(output, inputs)
        if isinstance(found, Mapping):  # if not, the evaluation raises an error
            unshared.update(name for name, metric in found.items() if not is_sendable(metric))
        return found

    return replace(task, metrics=metrics)


def describe_unshared(names: Collection[str], group: Group) -> list[str]:
    """Return a message if ranks cannot share an evaluation because of the metrics in `names`."""
    if group.is_alone or not names:
        return []
    named = ", ".join(sorted(names))
    why = (
        f"only their own code can merge the metrics {named}; metrics whose attributes "
        "are tensors, numbers and text can be merged across ranks"
    )
    return [f"every rank evaluates all samples, since {why}"]


def _name_of(metric: Metric) -> str:
    kind = type(metric)
    return kind.__name__ if kind in PLAIN.values() else f"{kind.__module__}.{kind.__qualname__}"


def _as_row(part: BatchResult) -> list[Any]:
    terms = [
        [name, _number(total), _number(count), weight] for name, total, count, weight in part.terms
    ]
    metrics = {name: [_name_of(each), _as_values(each)] for name, each in part.metrics.items()}
    return [part.num_samples, terms, metrics]


def _as_values(metric: Metric) -> Any:
    if isinstance(metric, Mean) and type(metric) in PLAIN.values():
        return [_number(metric.total), _number(metric.count), metric.better, metric.unit]
    return {
        name: [value.tolist(), str(value.dtype).removeprefix("torch."), list(value.shape)]
        if isinstance(value, Tensor)
        else [value]
        for name, value in vars(metric).items()
    }


def _number(value: Number) -> float:
    """Return `value` as a Python number, because JSON has no tensors and no NumPy types."""
    return value if isinstance(value, (int, float)) else value.item()


def _from_row(row: list[Any], known: Mapping[str, Any]) -> BatchResult:
    num_samples, terms, metrics = row
    return BatchResult(
        num_samples,
        tuple((name, total, count, weight) for name, total, count, weight in terms),
        {name: _metric_of(known[kind], values) for name, (kind, values) in metrics.items()},
    )


def _metric_of(kind: Any, values: Any) -> Metric:
    if isinstance(values, list):
        plain: Metric = kind(*values)
        return plain
    made: Metric = object.__new__(kind)
    vars(made).update({name: _value_of(*given) for name, given in values.items()})
    return made


def _value_of(value: Any, dtype: str | None = None, shape: Sequence[int] = ()) -> Any:
    return (
        value
        if dtype is None
        else torch.tensor(value, dtype=getattr(torch, dtype)).reshape(tuple(shape))
    )
