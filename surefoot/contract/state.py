"""The report of a step, its timing and compilations, and the parts of sharded parameters.

Reading a value of a StepReport waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


def master_of(parameter: Tensor) -> Tensor:
    """Return the tensor that the optimizer updates for `parameter`.

    It is the fp32 master weight of a parameter with a smaller dtype, or else the parameter itself.
    """
    master: Tensor = getattr(parameter, "master", parameter)
    return master


def leaf_of(tensor: Tensor) -> Tensor:
    """Return the model parameter whose fp32 master weight is `tensor`, or else `tensor` itself."""
    parameter: Tensor = getattr(tensor, "served", tensor)
    return parameter


def run_last(parameter: Tensor, hook: int) -> None:
    """Move a post-accumulate hook, given by the id of its handle, behind those added after it."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    if next(reversed(hooks)) != hook:
        hooks[hook] = hooks.pop(hook)


class Owner(Protocol):
    """Object that manages sharded parameters; `publish` writes updated rows back to the model."""

    def publish(self) -> None: ...


@dataclass(frozen=True)
class Part:
    """Rows of a sharded tensor that this rank stores and updates.

    `start` is the index of the first row, `whole` the shape of the unsharded tensor.
    """

    start: int
    whole: tuple[int, ...]
    owner: Owner


def part_of(tensor: Tensor) -> Part | None:
    """Return which part of a sharded tensor `tensor` is; None if it is not sharded."""
    part: Part | None = getattr(tensor, "part", None)
    return part


def mark_same_part(kept: Tensor, moved: Tensor) -> Tensor:
    """Mark `kept` as the same part of a sharded tensor that `moved` is, and return `kept`."""
    part = part_of(moved)
    if part is not None:
        kept.part = part  # type: ignore[attr-defined]
    return kept


def with_strides_of(kept: Tensor, moved: Tensor) -> Tensor:
    """Return the optimizer state `kept` with the strides of its parameter `moved`.

    Fused kernels require equal strides. A file stores every tensor in row-major order, but
    convolution weights may be channels last.
    """
    if kept.shape != moved.shape or kept.stride() == moved.stride() or not kept.is_floating_point():
        return kept
    return moved.detach().to(device=kept.device, dtype=kept.dtype, copy=True).copy_(kept)


def learning_rate_of(group: Mapping[str, Any]) -> float | Tensor | None:
    """Return a parameter group's `lr`; None if the optimizer computes its own learning rate.

    transformers' Adafactor has `lr=None`; some optimizers have no `lr` at all.
    """
    rate: float | Tensor | None = group.get("lr")
    return rate


@dataclass(frozen=True)
class Scaling:
    """Loss scale after a step, and whether the gradients of the step overflowed.

    Tensors are read from the device only when they are needed.
    """

    scale: float | Tensor
    overflowed: bool | Tensor


@dataclass(slots=True)
class StepReport:
    """Report of one optimizer step.

    Reading `loss`, `gradient_norm` or `applied` waits for the device; creating a report does not.

    Args:
        step: Number of the step, from 1.
        epoch: Number of passes over the data so far; 1.5 is the middle of the second epoch.
        num_samples: Number of samples that this step consumed, on all ranks together.
        learning_rate: Learning rate of the step; None if the optimizer computes its own.
        totals: Total, count and weight of each term of the loss, by name.
        norm: Global gradient norm before clipping; None unless exactly one update ran.
        was_applied: True if the optimizer step was applied, False if it was skipped.
        waiting_s: Seconds that the step waited for its batch.
    """

    step: int
    epoch: float
    num_samples: int
    learning_rate: float | Tensor | None
    totals: Mapping[str, tuple[Tensor, float | Tensor, float]] = field(repr=False)
    norm: float | Tensor | None = field(repr=False)
    was_applied: bool | Tensor = field(repr=False)
    waiting_s: float = 0.0
    scaling: Scaling | None = field(default=None, init=False, repr=False)
    # update -> its keys in `totals`
    updates: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False, repr=False)

    @property
    def terms(self) -> dict[str, float | None]:
        """Mean of each term of the loss: its total divided by its count, None if the count is 0."""
        return {
            name: float(total) / float(count) if float(count) else None
            for name, (total, count, _) in self.totals.items()
        }

    @property
    def loss(self) -> float | None:
        """Weighted sum of the means of the terms of the loss, over the global batch.

        None if no update ran in this step, or if the counts of all terms are 0.
        """
        loss = None
        for total, count, weight in self.totals.values():
            if number := float(count):
                loss = (loss or 0.0) + weight * float(total) / number
        return loss

    @property
    def gradient_norm(self) -> float | None:
        """Global gradient norm before clipping; None unless exactly one update ran."""
        return None if self.norm is None else float(self.norm)

    @property
    def empty_updates(self) -> tuple[str, ...]:
        """Names of updates that were skipped because their loss counted no item in the batch."""
        return tuple(
            name
            for name, keys in self.updates.items()
            if not any(float(self.totals[key][1]) for key in keys)
        )

    @property
    def applied(self) -> bool:
        """True if the weights were updated.

        False if the step was skipped, because its gradient was non-finite or its loss counted no
        item.
        """
        return bool(self.was_applied)

    @property
    def overflowed(self) -> bool:
        """True if gradients overflowed fp16 although the losses are finite.

        In this case the loss scale is reduced.
        """
        return self.scaling is not None and bool(self.scaling.overflowed)

    @property
    def loss_scale(self) -> float | None:
        """Loss scale after this step; None if the loss is not scaled."""
        return None if self.scaling is None else float(self.scaling.scale)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of several steps.

    `phases` has the total seconds of each phase, such as "forward", that took any time. `step_s`
    has the wall time of each step in seconds. `outliers` are unusually slow steps, each with
    `step`, `elapsed_s` and `cause`.
    """

    phases: Mapping[str, float]
    step_s: tuple[float, ...]
    outliers: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Compilation of a function.

    `why_again` is the reason if it is a recompilation, else None. `ended_early` is the line and the
    reason of a graph break, None if there was none.
    """

    function: str
    file: str
    line: int
    elapsed_s: float
    num_operators: int
    is_backward: bool
    why_again: str | None
    ended_early: str | None

    @property
    def words(self) -> str:
        """The compilation as one line of text."""
        where = (
            f"{self.function} ({PurePath(self.file).name}:{self.line})" if self.function else "code"
        )
        what = "the backward pass" if self.is_backward else where
        again = "" if self.why_again is None else f" again: {self.why_again}"
        early = "" if self.ended_early is None else f"; graph break: {self.ended_early}"
        return f"compiled {what}{again}{early}"
