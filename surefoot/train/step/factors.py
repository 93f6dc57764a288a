"""Factors that turn the gradient sums of a step into the gradient of the mean loss.

If the item counts are known before the forward pass, the backward pass divides the gradient of each
term by its global count. If not, the backward pass multiplies it by a power of two, and the rest of
the factor is applied after the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.components.data.feed import Feed
from surefoot.contract.task import Batch, Loss, ResolvedTask, Term
from surefoot.core.errors import TaskError

if TYPE_CHECKING:
    from surefoot.components.precision.scaler import LossScaler
    from surefoot.train.step.collectives import Collectives

Count = float | Tensor


def check_count(name: str, count: Count) -> None:
    """Raise TaskError unless the count of a term is finite and at least 0."""
    if not 0 <= float(count) < math.inf:
        raise TaskError(
            (
                f"the count of the loss term {name!r} must be finite and at least 0; got "
                f"{float(count):g}"
            ),
            hint="pass the number of items that the loss is summed over",
        )


def check_gathered(
    counts: Mapping[str, float] | float, mine: Mapping[str, tuple[Tensor, Count, float]]
) -> None:
    """Raise TaskError if a loss counts items of all ranks, although `counts(batch)` does not.

    Such a loss gathers the rows of all ranks, and each rank counts all of them. `counts` and `mine`
    (total, count and weight of each term) are sums over all ranks.
    """
    for name, (_, count, _) in mine.items():
        said = counts.get(name) if isinstance(counts, Mapping) else counts
        if said is not None and said != float(count):
            raise TaskError(
                f"counts(batch) returns {said:g} on all ranks for the "
                f"term {name}, whose loss counts {float(count):g}",
                hint=(
                    "sum and count only the rows of this rank in the loss, or remove counts(batch)"
                ),
            )


def check_splittable(
    name: str, loss: Loss, counts_are_known: bool, feed: Feed, *, joins_ranks: bool = False
) -> None:
    """Raise TaskError for a loss that may not be split over microbatches and ranks.

    `name` is the name of the update. `feed` says by which settings the batch is split. With
    `joins_ranks`, each rank has one microbatch, and the loss gathers the microbatches of all ranks.
    """
    if not loss.additive and not joins_ranks:
        raise TaskError(
            f"the loss of update {name} is not additive and cannot be split",
            hint=_how_to_train_whole(feed)
            + "; on several ranks, compare the samples that surefoot.all_gather returns",
        )
    if len(loss.terms) > 1 and not counts_are_known:
        terms = ", ".join(term.name for term in loss.terms)
        wanted = ", ".join(term.name for term in loss.terms if not term.fixed)
        raise TaskError(
            f"the terms {terms} have counts that are not known before the forward pass",
            hint=(
                "add counts(batch) -> {term: count} to the task "
                f"(of {wanted}), or {_how_to_train_whole(feed)}"
            ),
        )


def _how_to_train_whole(feed: Feed) -> str:
    """Return how to change the settings so that a batch is not split."""
    ways = {
        f"leave {' and '.join(feed.cut_keys)} out": feed.cut_keys and feed.has_microbatches,
        "train on one rank": feed.share.size > 1,
        "leave layout.virtual_ranks out": feed.share.pieces is not None,
    }
    chosen = [way for way, applies in ways.items() if applies]
    return " and ".join(chosen) or "leave memory.on_oom out"


MAX_CONSTANTS = 1000
Counts = Mapping[str, float] | float | None  # of the global batch; None if they are not known


class LossFactors:
    """Factors of the loss terms in the backward pass, and of the gradient sums after it."""

    def __init__(self, task: ResolvedTask, device: torch.device, scaler: LossScaler | None) -> None:
        self._task, self._device, self._scaler = task, device, scaler
        self._moves = device.type != "cpu"
        self._constants: dict[tuple[float, torch.dtype], Tensor] = {}

    def known_counts(
        self, batches: list[Batch], collectives: Collectives, update: str = ""
    ) -> Counts:
        """Return the item counts of the global batch, or None if only the loss can give them.

        Returns None for one microbatch on one rank too, since its loss has the global counts.
        """
        if self._task.counts is None or not (collectives.splits or len(batches) > 1):
            return None
        return collectives.sum_counts(update, [self._task.counts(batch) for batch in batches])

    def mean_factor(
        self, totals: Mapping[str, tuple[Tensor, Count, float]], scale: float | None
    ) -> float | Tensor:
        """Return the factor that turns the gradient sums into means.

        The factor is NaN, which skips the step, if no item was counted. `scale` is the power of two
        of the backward pass, or None if the backward pass divided by the counts. Raises TaskError
        for an invalid count.
        """
        counts = [count for _, count, _ in totals.values()]
        is_known = not self._moves or not any(isinstance(count, Tensor) for count in counts)
        if is_known:
            for term, (_, count, _) in totals.items():
                check_count(term, count)
        if is_known and not any(map(float, counts)):
            return math.nan
        if scale is None:
            return (
                1.0
                if is_known
                else torch.where(
                    torch.as_tensor(sum(counts), device=self._device) > 0, 1.0, math.nan
                )
            )
        (count,) = counts
        if not isinstance(count, Tensor):
            return 1.0 / (scale * float(count))
        # 32 bits would limit the precision of a float64 model
        exact = count if count.device.type == "mps" else count.double()
        return 1.0 / (scale * exact)

    @staticmethod
    def divisor(term: Term, counts: Counts, scale: float | None) -> Count:
        """Return the number by which the backward pass divides the total of `term`.

        The weight of the term is not included.
        """
        if scale is not None:
            return 1.0 / scale
        return (
            term.count
            if counts is None or term.fixed
            else counts[term.name]
            if isinstance(counts, Mapping)
            else counts
        )

    def of(self, term: Term, counts: Counts, scale: float | None, num_microbatches: int) -> Tensor:
        """Return the gradient of the total of `term`, with which its backward pass starts.

        It is weight / global count, or weight * `scale` if the count is not known. With fp16 it
        includes the loss scale. `num_microbatches` is the number of the step on all ranks.
        """
        total = term.total
        if scale is not None:
            return self._scaled(self._constant(term.weight * scale, total))
        if term.fixed:  # counts once per step: each microbatch adds an equal share
            count: Count = term.count * num_microbatches
        else:
            count = (
                term.count
                if counts is None
                else counts[term.name]
                if isinstance(counts, Mapping)
                else counts
            )
        if isinstance(count, Tensor):
            # in 16 bits the count would be rounded
            count = count.to(torch.promote_types(total.dtype, torch.float32))
            return self._scaled(torch.where(count > 0, term.weight / count, 0.0).to(total))
        # a term without items adds nothing
        return self._scaled(self._constant(term.weight / float(count) if count else 0.0, total))

    def _scaled(self, factor: Tensor) -> Tensor:
        """Return `factor` times the loss scale of fp16; `factor` itself without a loss scale."""
        return factor if self._scaler is None else self._scaler.seed(factor)

    def _constant(self, value: float, like: Tensor) -> Tensor:
        """Return `value` as a cached scalar tensor with the dtype of `like`.

        Values mostly repeat from step to step.
        """
        key = (value, like.dtype)
        if key not in self._constants:
            if len(self._constants) > MAX_CONSTANTS:
                self._constants.clear()
            self._constants[key] = torch.full_like(like, value, requires_grad=False)
        return self._constants[key]
