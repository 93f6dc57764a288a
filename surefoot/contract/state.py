"""What one step did, and what a run holds at a step. Reading a value of a StepReport is what waits for the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


def master_of(parameter: Tensor) -> Tensor:
    """What the optimiser moves: the fp32 master of a parameter that is stored in fewer bits, or itself where it has none."""
    master: Tensor = getattr(parameter, "master", parameter)
    return master


def leaf_of(tensor: Tensor) -> Tensor:
    """What the model computes with: the parameter that `tensor` is the master of, or itself."""
    parameter: Tensor = getattr(tensor, "served", tensor)
    return parameter


class Owner(Protocol):
    """Who tells a model's parameters that their parts have moved."""

    def publish(self) -> None: ...


@dataclass(frozen=True)
class Part:
    """The rows `start`, `start + 1`, ... of a tensor of shape `whole`, which this rank holds and moves."""

    start: int
    whole: tuple[int, ...]
    owner: Owner


def part_of(tensor: Tensor) -> Part | None:
    """Which part of a whole `tensor` is; None where it is all of it."""
    part: Part | None = getattr(tensor, "part", None)
    return part


def laid_by(kept: Tensor, moved: Tensor) -> Tensor:
    """`kept`, known as the same part of a whole that `moved` is."""
    part = part_of(moved)
    if part is not None:
        kept.part = part  # type: ignore[attr-defined]
    return kept


def laid_as(kept: Tensor, moved: Tensor) -> Tensor:
    """What an optimiser keeps of each number of `moved`, laid out in memory as that is: fused kernels go through both side by side.

    A file holds every tensor row by row, and the filters of a model may stand channels last.
    """
    if kept.shape != moved.shape or kept.stride() == moved.stride() or not kept.is_floating_point():
        return kept
    return moved.detach().to(device=kept.device, dtype=kept.dtype, copy=True).copy_(kept)


@dataclass(frozen=True)
class Scaling:
    """The loss scale after a step, and whether its gradients overflowed; read when they are asked for."""

    scale: float | Tensor
    overflowed: bool | Tensor


@dataclass(slots=True)
class StepReport:
    """What one optimiser step did. Nothing waits for the device until `loss`, `gradient_norm` or `applied` is read.

    `step` counts from 1, `epoch` is the fraction of the data seen, `num_samples` what this step consumed.
    """

    step: int
    epoch: float
    num_samples: int
    learning_rate: float | Tensor
    totals: Mapping[str, tuple[Tensor, float | Tensor, float]] = field(repr=False)
    norm: float | Tensor | None = field(repr=False)
    was_applied: bool | Tensor = field(repr=False)
    waiting_s: float = 0.0
    scaling: Scaling | None = field(default=None, init=False, repr=False)
    updates: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False, repr=False)  # update -> its keys in `totals`

    @property
    def terms(self) -> dict[str, float | None]:
        """Each term's mean: its total over its count, None where the count is 0."""
        return {name: float(total) / float(count) if float(count) else None for name, (total, count, _) in self.totals.items()}

    @property
    def loss(self) -> float | None:
        """The weighted sum of the terms' means over the whole global batch; None where no update ran in this step, or no item counted."""
        if not any(float(count) for _, count, _ in self.totals.values()):
            return None
        return sum(weight * float(total) / float(count) for total, count, weight in self.totals.values() if float(count))

    @property
    def gradient_norm(self) -> float | None:
        """The global norm before clipping; None where several updates have several."""
        return None if self.norm is None else float(self.norm)

    @property
    def empty_updates(self) -> tuple[str, ...]:
        """The updates whose loss counted no item in the whole global batch: they were skipped."""
        return tuple(name for name, keys in self.updates.items() if not any(float(self.totals[key][1]) for key in keys))

    @property
    def applied(self) -> bool:
        """False when the step was skipped: its gradient was not finite, or its loss counted no item."""
        return bool(self.was_applied)

    @property
    def overflowed(self) -> bool:
        """Whether gradients overflowed fp16 though the losses are finite, which the loss scale answers."""
        return self.scaling is not None and bool(self.scaling.overflowed)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale after this step; None without one."""
        return None if self.scaling is None else float(self.scaling.scale)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Where the time went: seconds by phase (those without any left out), wall seconds by step, and the steps that stood out.

    An outlier has `step`, `elapsed_s` and `cause`.
    """

    phases: Mapping[str, float]
    step_s: tuple[float, ...]
    outliers: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """One compilation of one function: `why_again` is None for its first, `ended_early` names the line and reason of a graph break."""

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
        """In a line for a person."""
        where = f"{self.function} ({PurePath(self.file).name}:{self.line})" if self.function else "code"
        what = "the backward pass" if self.is_backward else where
        again = "" if self.why_again is None else f" again: {self.why_again}"
        early = "" if self.ended_early is None else f"; its graph ends early: {self.ended_early}"
        return f"compiled {what}{again}{early}"
