"""Choice of the samples on which the loss is tried before the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from surefoot.components.data.feed import Feed
from surefoot.contract.task import Batch, Loss
from surefoot.core.errors import TaskError
from surefoot.train.assemble import Assembly

NUM_SAMPLES = 8
NUM_SOUGHT = 64  # steps, spread over the epoch, that are searched for items that count


class SampleLosses(NamedTuple):
    """Samples as one batch, and the loss of each update on this batch."""

    ids: np.ndarray
    batch: Batch
    losses: list[Loss]


def find(
    assembly: Assembly, attempt: Callable[[np.ndarray], SampleLosses]
) -> tuple[SampleLosses, list[str]]:
    """Return the samples on which the loss is checked, and warnings.

    Normally these are the first `NUM_SAMPLES` samples. If the model fails on so few, a whole
    microbatch is used. If the loss of an update counts none of their items, or is a constant for
    them, later samples are used. Raises TaskError if a loss counts no item in all of the data.
    """
    feed = assembly.feed
    tried = _try_sizes(feed, attempt)
    empty = _find_empty(assembly, tried)
    if not empty and not any(map(is_constant, tried.losses)):
        return tried, []
    if feed.source.guarantee != "proven":  # which can only be read in sequence
        return tried, [_describe(empty, "the first batch")] if empty else []
    num_steps, num_tried = feed.steps_per_epoch or NUM_SOUGHT, 0
    for step in sorted(
        {int(step) for step in np.linspace(0, num_steps - 1, min(num_steps, NUM_SOUGHT))}
    ):
        for part in feed.microbatches(feed.window(step))[: None if num_steps <= NUM_SOUGHT else 1]:
            later = attempt(part)
            num_tried += len(part)
            if not _find_empty(assembly, later) and not any(map(is_constant, later.losses)):
                return later, []
    if not empty:  # the check of this loss names its constant
        return tried, []
    if num_tried < feed.order.n - feed.dropped:
        return tried, [_describe(empty, f"{num_tried:,} samples spread over the data")]
    raise TaskError(
        f"the loss of update {empty} returned the count 0 for every batch tried",
        hint="return the number of items that the loss is summed over",
    )


def _try_sizes(feed: Feed, attempt: Callable[[np.ndarray], SampleLosses]) -> SampleLosses:
    window = feed.window(0)
    own = feed.microbatches(window)[0]
    # a sequential source returns one batch at a time
    few = window.ids[:NUM_SAMPLES] if feed.source.guarantee == "proven" else own
    try:
        return attempt(few)
    except TaskError:
        if len(own) == len(few):
            raise
    return attempt(own)  # a model may be built for batches of one size


def _find_empty(assembly: Assembly, tried: SampleLosses) -> str:
    """Return the name of the first update whose loss counts no item; "" if all count some."""
    pairs = zip(assembly.updates, tried.losses, strict=True)
    return next(
        (
            update.name
            for update, loss in pairs
            if loss.terms and not any(float(term.count) for term in loss.terms)
        ),
        "",
    )


def is_constant(loss: Loss) -> bool:
    """Return whether a loss counts items, but none of its terms depends on the model."""
    has_gradient = any(getattr(term.total, "requires_grad", True) for term in loss.terms)
    return not has_gradient and any(float(term.count) for term in loss.terms)


def _describe(name: str, where: str) -> str:
    return (
        f"the loss of update {name} counts 0 items in {where}: steps that count 0 items are skipped"
    )
