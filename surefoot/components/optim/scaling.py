"""Scaling of the learning rate to another batch size than it was tuned for, and warnings where that
rule fails."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.contract.spec import OptimTable
from surefoot.core.schedule.curves import scale_to_batch

# the largest batch that the linear rule was shown to hold for, with warm-up: Goyal et al., 2017
LARGEST_PLAIN = 8192
LOOKED_AT = 200  # steps at which a curve is sampled

Curve = Callable[[int], float]


def scaled(curve: Curve, table: OptimTable, batch_at: Callable[[int], int]) -> Curve:
    """Return the curve times the factor that `optim.reference_batch` gives for the batch at each
    step; `curve` itself without it."""
    reference = table.reference_batch
    if reference is None:
        return curve
    return lambda step: curve(step) * scale_to_batch(batch_at(step), reference, table.scaling)


def describe_scaling(table: OptimTable, batch: int) -> list[str]:
    """Return a line for the log on the factor of the learning rate; nothing without
    `optim.reference_batch`."""
    if table.reference_batch is None:
        return []
    factor = scale_to_batch(batch, table.reference_batch, table.scaling)
    return [
        (
            f"the learning rate is x {factor:.4g} for a batch of {batch:,}: "
            f"optim.lr is for {table.reference_batch:,} ({table.scaling})"
        )
    ]


def warn_of_no_rate(curve: Curve, total_steps: int | None) -> list[str]:
    """Return a warning for a learning rate that is 0 in every step of the run; nothing for any
    other."""
    if total_steps is None or any(
        curve(step) for step in range(0, total_steps, max(1, total_steps // LOOKED_AT))
    ):
        return []
    return [
        (
            f"the learning rate is 0 in each of the {total_steps:,} steps, "
            "so that nothing is trained: look at [schedule]"
        )
    ]


def warn_of_large_batch(
    curve: Curve, batch: int, total_steps: int | None, optimizer: str
) -> list[str]:
    """Return a warning for a batch above 8,192 whose learning rate does not rise at first; nothing
    for any other."""
    total = total_steps or LOOKED_AT
    later = max(curve(step) for step in range(0, total, max(1, total // LOOKED_AT)))
    if batch <= LARGEST_PLAIN or curve(0) < later:
        return []
    also = (
        ""
        if optimizer in ("lars", "lamb")
        else ', and name optim.name = "lars" (for "sgd") or "lamb" (for "adamw")'
    )
    why = f"above {LARGEST_PLAIN:,} the first steps are too large for a rate that was scaled up"
    return [f'a batch of {batch:,} without warm-up: {why}; set schedule.warmup = "5 epochs"{also}']
