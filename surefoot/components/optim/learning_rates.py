"""Learning rates of parameter groups, and their scaling to a batch size.

A training loop may set the learning rates of groups directly, as torch's schedulers do. Some
functions return warnings about learning rates that do not work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from surefoot.contract.spec import OptimTable
from surefoot.contract.state import learning_rate_of
from surefoot.core.errors import SpecError
from surefoot.core.schedule.curves import scale_to_batch

# the largest batch that the linear rule was shown to hold for, with warm-up: Goyal et al., 2017
MAX_PLAIN = 8192
LOOKED_AT = 200  # steps at which a curve is sampled

Curve = Callable[[int], float]


class LearningRates:
    """Learning rates of parameter groups, with detection of values that other code has set.

    The base learning rate of a group is its initial `lr` times its multiplier `rate`; a schedule
    (`has_curve`) scales it further. Without a schedule, and with a multiplier of 1, a value that
    other code sets becomes the base learning rate.
    """

    def __init__(self, *, has_curve: bool) -> None:
        self._has_curve = has_curve
        self._groups: list[dict[str, Any]] = []
        self._bases: list[float] = []
        self._written: list[tuple[Any, int]] = []  # None: the optimizer computes its own

    def take(self, groups: list[dict[str, Any]]) -> None:
        """Replace the parameter groups by `groups`, and determine their base learning rates.

        The base learning rate of a new group is its `lr` times its multiplier. Groups that were
        loaded from a state dict have the `lr` of the step at which they were saved. With a
        schedule, they therefore keep the base learning rates from before.
        """
        known = {id(group) for group in self._groups}
        is_loaded = any(id(group) not in known for group in groups[: len(self._groups)])
        count = len(self._bases) if not is_loaded or self._has_curve else 0
        multiplied = [group.get("rate", 1.0) for group in groups]
        if is_loaded and not self._has_curve:
            # the saved lr includes the multiplier
            multiplied[: len(self._groups)] = [1.0] * min(len(groups), len(self._groups))
        added = [_base_of(group) * rate for group, rate in zip(groups, multiplied, strict=True)]
        self._bases = [*self._bases[: min(count, len(groups))], *added[count:]]
        written = self._written if not is_loaded else []
        self._groups = groups
        self._written = [*written, *(_mark(group.get("lr")) for group in groups[len(written) :])]

    def read(self) -> list[float]:
        """Return the base learning rate of each group.

        Raises SpecError if other code has set an `lr` that a schedule or a multiplier determines.
        """
        for number, (group, written) in enumerate(zip(self._groups, self._written, strict=True)):
            rate = group.get("lr")
            if (rate is written[0] and type(rate) is float) or _is_same(rate, written):
                continue
            if self._has_curve or group.get("rate", 1.0) != 1.0:
                decided = (
                    "the curve of the update"
                    if self._has_curve
                    else f"its multiplier, rate = {group['rate']:g}"
                )
                raise SpecError(
                    (
                        f"the learning rate of parameter group {number} was set to "
                        f"{_base_of(group):g}, and {decided} sets it, too"
                    ),
                    hint=(
                        "use one of them: a torch scheduler works with a GuardedUpdate "
                        "without curve, over groups without rate"
                    ),
                )
            self._bases[number], self._written[number] = _base_of(group), _mark(rate)
        return self._bases

    def write(self, rates: Sequence[float | Tensor]) -> None:
        for number, (group, rate) in enumerate(zip(self._groups, rates, strict=True)):
            if self._written[number][0] is None:
                continue  # the optimizer computes its learning rate
            group["lr"], self._written[number] = (
                rate,
                (rate, 0) if type(rate) is float else _mark(rate),
            )

    def keep(self) -> None:
        """Record the current `lr` of each group as if this object had written it."""
        self._written = [_mark(group.get("lr")) for group in self._groups]


def _base_of(group: Mapping[str, Any]) -> float:
    rate = learning_rate_of(group)
    return 0.0 if rate is None else float(rate)


def _mark(rate: float | Tensor | None) -> tuple[float | Tensor | None, int]:
    return rate, rate._version if isinstance(rate, Tensor) else 0


def _is_same(rate: float | Tensor | None, written: tuple[float | Tensor | None, int]) -> bool:
    """Return whether a learning rate is the recorded one.

    For a tensor, the version counter is compared too, because a scheduler may change it in place.
    """
    value, version = written
    if isinstance(rate, Tensor) or isinstance(value, Tensor):
        return rate is value and rate._version == version  # type: ignore[union-attr]
    return rate == value


def apply_batch_scaling(curve: Curve, table: OptimTable, batch_at: Callable[[int], int]) -> Curve:
    """Return `curve` multiplied by the factor that `optim.reference_batch` gives for a batch size.

    `batch_at(step)` is the batch size of a step. Without `optim.reference_batch`, `curve` itself is
    returned.
    """
    reference = table.reference_batch
    if reference is None:
        return curve
    return lambda step: curve(step) * scale_to_batch(batch_at(step), reference, table.scaling)


def describe_scaling(table: OptimTable, batch: int) -> list[str]:
    """Return a line for the log about the factor by which the batch size scales the learning rate.

    Without `optim.reference_batch`, there is no factor, and the list is empty.
    """
    if table.reference_batch is None:
        return []
    factor = scale_to_batch(batch, table.reference_batch, table.scaling)
    return [
        (
            f"the learning rate is x {factor:.4g} for a batch of {batch:,}: "
            f"optim.lr is for {table.reference_batch:,} ({table.scaling})"
        )
    ]


def warn_of_no_rate(curve: Curve, total_steps: int | None, lr: float) -> list[str]:
    """Return a warning if the learning rate is 0 in every step of the run, else an empty list.

    `lr` is `optim.lr`, which `curve` multiplies.
    """
    if lr == 0:
        return ["the learning rate is 0 in all steps, so no weight changes: check optim.lr"]
    if total_steps is None or any(
        curve(step) for step in range(0, total_steps, max(1, total_steps // LOOKED_AT))
    ):
        return []
    return [
        (
            f"the learning rate is 0 in all {total_steps:,} steps, so no weight changes: "
            "check [schedule]"
        )
    ]


def warn_of_large_batch(
    curve: Curve, batch: int, total_steps: int | None, optimizer: str
) -> list[str]:
    """Return a warning for a batch size above 8,192 without warm-up, else an empty list."""
    total = total_steps or LOOKED_AT
    later = max(curve(step) for step in range(0, total, max(1, total // LOOKED_AT)))
    if batch <= MAX_PLAIN or curve(0) < later:
        return []
    also = (
        ""
        if optimizer in ("lars", "lamb")
        else ', and name optim.name = "lars" (for "sgd") or "lamb" (for "adamw")'
    )
    why = f"above {MAX_PLAIN:,} the first steps are too large for a scaled learning rate"
    return [f'a batch of {batch:,} without warm-up: {why}; set schedule.warmup = "5 epochs"{also}']
