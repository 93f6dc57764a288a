"""The results of the batches of an evaluation, merged in the order of the batches, whichever rank computed them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from surefoot.components.metrics import BitsPerByte, Mean, Perplexity
from surefoot.contract.task import Metric
from surefoot.runtime.comm import Group

PLAIN: dict[str, Any] = {kind.__name__: kind for kind in (Mean, Perplexity, BitsPerByte)}  # totals and counts, which go as text
Number = Tensor | float
Term = tuple[str, Number, Number, float]


class Part(NamedTuple):
    """What one batch gave: its samples, its loss terms (name, total, count, weight) and its metrics."""

    num_samples: int
    terms: tuple[Term, ...]
    metrics: Mapping[str, Metric]


class Merged:
    """The samples, the terms (each with its weight) and the metrics of all parts so far."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.terms: dict[str, tuple[Mean, float]] = {}
        self.metrics: dict[str, Metric] = {}

    def add(self, part: Part) -> None:
        self.num_samples += part.num_samples
        for name, total, count, weight in part.terms:
            mean = Mean(total, count, "lower")
            self.terms[name] = (mean if name not in self.terms else self.terms[name][0].merge(mean), weight)
        for name, metric in part.metrics.items():
            self.metrics[name] = self.metrics[name].merge(metric) if name in self.metrics else metric


def gather(mine: Sequence[Part], group: Group, *, can_share: bool = True) -> list[Part] | None:
    """The parts of all ranks, of which each computed every n-th batch of n ranks.

    None where a metric is one that only its own code merges, or a rank says that the batches may not be shared.
    """
    is_plain = all(type(metric) in PLAIN.values() for part in mine for metric in part.metrics.values())
    if group.most([float(not (is_plain and can_share))])[0]:
        return None
    rows = [json.loads(text) for text in group.exchange(json.dumps([_as_row(part) for part in mine]))]
    return [_from_row(rows[number % group.size][number // group.size]) for number in range(sum(map(len, rows)))]


def _as_row(part: Part) -> list[Any]:
    terms = [[name, _number(total), _number(count), weight] for name, total, count, weight in part.terms]
    metrics = {
        name: [type(each).__name__, _number(each.total), _number(each.count), each.better, each.unit]
        for name, each in part.metrics.items()
        if isinstance(each, Mean)
    }
    return [part.num_samples, terms, metrics]


def _number(value: Number) -> float:
    """As Python's own; NumPy's have no place in a text."""
    return value if isinstance(value, (int, float)) else value.item()


def _from_row(row: list[Any]) -> Part:
    num_samples, terms, metrics = row
    return Part(
        num_samples,
        tuple((name, total, count, weight) for name, total, count, weight in terms),
        {name: PLAIN[kind](total, count, better, unit) for name, (kind, total, count, better, unit) in metrics.items()},
    )
