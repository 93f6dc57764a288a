"""Metrics as partial results that can be merged over batches, microbatches and ranks.

A partial result has a total and a count on the device. They are divided once, when the value is
read. `accuracy(...).merge(accuracy(...)).value()` is therefore exact for any split of the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import Tensor

from surefoot.core.errors import TaskError, require_package

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Mean:
    """Mean over items as a total and a count, which can be merged with those of other batches.

    Args:
        total: Sum over the items; a scalar tensor or a number.
        count: Number of items; if it is 0, the value is None.
        better: Whether a "higher" or a "lower" value is better.
        unit: Unit for display; with "%", the displayed value is multiplied by 100.
    """

    total: Tensor | float
    count: Tensor | float
    better: Better = "higher"
    unit: str = ""

    def merge(self, other: Self) -> Self:
        """Return a partial result with the sum of the totals and the sum of the counts, in 64 bits.

        The sums are bitwise identical for tensors and for Python numbers, such as those from other
        ranks.
        """
        total, count = (
            _held(self.total) + _held(other.total),
            _held(self.count) + _held(other.count),
        )
        return type(self)(total, count, self.better, self.unit)

    def value(self) -> float | None:
        count = float(self.count)
        return float(self.total) / count if count else None


class Perplexity(Mean):
    """Perplexity exp(total / count) over the whole data set; it is not a mean over batches.

    Args:
        total: Summed negative log-likelihood in nats.
        count: Number of tokens.
        better: Whether a "higher" or a "lower" value is better; the function `perplexity` sets
            "lower".
        unit: Unit for display.
    """

    def value(self) -> float | None:
        mean = super().value()
        return None if mean is None else math.inf if mean > 700 else math.exp(mean)


class BitsPerByte(Mean):
    """Bits per byte over the whole data set, total / (count * ln 2).

    Args:
        total: Summed negative log-likelihood in nats.
        count: Number of bytes of the text.
        better: Whether a "higher" or a "lower" value is better; the function `bits_per_byte` sets
            "lower".
        unit: Unit for display.
    """

    def value(self) -> float | None:
        mean = super().value()
        return None if mean is None else mean / math.log(2)


def accuracy(logits: Tensor, labels: Tensor) -> Mean:
    """Return the fraction of samples whose largest logit is that of their label.

    Args:
        logits: (B, C) or (B, T, C), with at least 2 classes.
        labels: Class indices (B,) or (B, T); samples with the label -100 are ignored.

    Raises:
        TaskError: For other shapes.
    """
    return top_k(logits, labels, 1)


def top_k(logits: Tensor, labels: Tensor, k: int) -> Mean:
    """Return the fraction of samples whose label is among the classes with the `k` largest logits.

    Args:
        logits: (B, C) or (B, T, C), with at least 2 classes.
        labels: Class indices (B,) or (B, T); samples with the label -100 are ignored.
        k: Number of logits, from 1 to C.

    Raises:
        TaskError: For other shapes, and for a `k` that is not from 1 to C.
    """
    _check_shapes(logits, labels)
    if not 1 <= k <= logits.shape[-1]:
        raise TaskError(
            f"top-{k} of {logits.shape[-1]} classes", hint=f"use a k from 1 to {logits.shape[-1]}"
        )
    counted = labels != -100
    chosen = logits.argmax(-1, keepdim=True) if k == 1 else logits.topk(k, dim=-1).indices
    hits = ((chosen == labels.unsqueeze(-1)).any(-1) & counted).sum()
    return Mean(hits, counted.sum(), unit="%")


def _check_shapes(logits: Tensor, labels: Tensor) -> None:
    """Raise TaskError if the shapes of logits and labels do not match.

    Shapes that could only be broadcast to each other do not match.
    """
    given = f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}"
    hint = "logits are (B, C) and labels (B,), or (B, T, C) and (B, T)"
    if logits.ndim < 2 or logits.shape[-1] < 2:
        raise TaskError(
            f"{given}: there are no 2 classes",
            hint=f"{hint}; for one logit compare it with 0 and use mean_of",
        )
    if labels.shape == (*logits.shape[:-1], 1):
        hint = f"{hint}: labels.squeeze(-1)"
    channels_first = logits.ndim > 3 and labels.shape == (logits.shape[0], *logits.shape[2:])
    if channels_first:
        hint = f"{hint}: logits.movedim(1, -1).flatten(0, -2) and labels.flatten()"
    if labels.shape != logits.shape[:-1] or channels_first:
        raise TaskError(f"{given} do not belong together", hint=hint)


def perplexity(total_nats: Tensor | float, count: Tensor | float) -> Perplexity:
    """Return the perplexity exp(total / count) as a partial result, which can be merged.

    Args:
        total_nats: Negative log-likelihood in nats, summed over the tokens.
        count: Number of tokens.
    """
    return Perplexity(_held(total_nats), count, better="lower")


def bits_per_byte(total_nats: Tensor | float, count: Tensor | float) -> BitsPerByte:
    """Return the bits per byte of a text as a partial result, which can be merged.

    Args:
        total_nats: Negative log-likelihood in nats, summed over the tokens.
        count: Number of bytes of the text.
    """
    return BitsPerByte(_held(total_nats), count, better="lower")


def mean_of(total: Tensor | float, count: Tensor | float, *, better: Better = "lower") -> Mean:
    """Return any mean as a partial result, which can be merged, from its total and its count.

    Args:
        total: Sum over the items; a scalar tensor, which is detached, or a number.
        count: Number of items.
        better: Whether a "higher" or a "lower" mean is better.
    """
    return Mean(_held(total), count, better=better)


def _held(total: Tensor | float) -> Tensor | float:
    if isinstance(total, Tensor):
        return total if total.device.type == "mps" else total.detach().double()
    return total if isinstance(total, int) else float(total)


class FromTorchmetrics:
    """Partial result of a torchmetrics metric, which merges with those of other batches and ranks.

    Example: `FromTorchmetrics(F1Score(...)).observe(predictions, targets)`.

    Args:
        metric: A `torchmetrics.Metric` whose states `Metric.merge_state` can merge.
        better: Whether a "higher" or a "lower" value is better; None reads
            `metric.higher_is_better`, and means "higher" if the metric does not define it.

    Raises:
        MissingExtra: If torchmetrics is not installed.
        TaskError: If `metric` is not a `torchmetrics.Metric`.
    """

    def __init__(self, metric: Any, *, better: Better | None = None) -> None:
        with require_package(
            "torchmetrics", "torchmetrics", extra="torchmetrics", needed_for="FromTorchmetrics"
        ):
            import torchmetrics
        if not isinstance(metric, torchmetrics.Metric):
            is_collection = isinstance(metric, torchmetrics.MetricCollection)
            raise TaskError(
                f"{type(metric).__name__} is not a torchmetrics metric",
                hint="give each of its metrics an entry of its own: {name: FromTorchmetrics(each)"
                ".observe(output, targets) for name, each in collection.items()}"
                if is_collection
                else "pass torchmetrics.F1Score(...) or the like",
            )
        self._metric = metric
        higher = metric.higher_is_better
        self.better: Better = better or ("lower" if higher is False else "higher")

    def observe(self, *arguments: Tensor) -> FromTorchmetrics:
        """Return a new partial result for one batch alone.

        The arguments are those of the metric's `update`.
        """
        fresh = self._metric.clone()
        fresh.reset()
        fresh.update(*arguments)
        return FromTorchmetrics(fresh, better=self.better)

    def merge(self, other: FromTorchmetrics) -> FromTorchmetrics:
        merged = self._metric.clone()
        merged.merge_state(other._metric)
        return FromTorchmetrics(merged, better=self.better)

    def value(self) -> Any:
        """Return the value; an evaluation raises an error for one that is not a single number."""
        computed = self._metric.compute()
        is_number = isinstance(computed, Tensor) and computed.numel() == 1
        return float(computed) if is_number else computed
