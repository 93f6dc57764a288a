"""Checks of a loss: its counts, and whether it may be split over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from surefoot.components.data.feed import Feed
from surefoot.contract.task import Loss
from surefoot.core.errors import TaskError

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
        "leave train.microbatch out": feed.has_microbatches,
        "train on one rank": feed.share.size > 1,
        "leave layout.virtual_ranks out": feed.share.pieces is not None,
    }
    chosen = [way for way, applies in ways.items() if applies]
    return " and ".join(chosen) or "leave memory.on_oom out"
