"""A torch optimizer whose groups can be updated one at a time, with gradient scaling and skipping
inside the update."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.core.errors import SpecError

# parameters, counters, first and second moments, momentum
Traced = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
# the allowed values of a group's settings
LEAST, MORE_THAN_0, BELOW_1 = "0 or more", "more than 0", "0 or more, and below 1"
ALLOWED = {
    "lr": LEAST,
    "weight_decay": LEAST,
    "eps": LEAST,
    "trust_coefficient": MORE_THAN_0,
    "momentum": BELOW_1,
    "betas": BELOW_1,
}


class ByGroup(Optimizer, ABC):
    """Base class of optimizers that update each group by `step_group`; `fused` in a group means
    that its update divides and skips.

    Raises SpecError for a setting that would raise the loss or make weights non-finite.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for name, allowed in ALLOWED.items():
            value = param_group.get(name, self.defaults.get(name))
            for each in (
                value if isinstance(value, tuple | list) else () if value is None else (value,)
            ):
                if not _is_allowed(each, allowed):
                    raise SpecError(f"{name} is {value!r}", hint=f"use a finite number: {allowed}")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure`, where given, computes the loss
        again first."""
        loss = call_closure(closure)
        for group in self.param_groups:
            self.step_group(group, group["lr"])
        return loss

    @abstractmethod
    def create_state(self, group: dict[str, Any]) -> None:
        """Create the missing entries of the state of a group's parameters."""

    @torch.no_grad()
    def step_group(
        self,
        group: dict[str, Any],
        lr: float | Tensor,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update one group at the learning rate `lr`; `grad_scale` and `found_inf` are for fused
        groups only."""
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        if params:
            self.create_state(group)
            self._move(
                group, params, [parameter.grad for parameter in params], lr, grad_scale, found_inf
            )

    @abstractmethod
    def _move(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        lr: float | Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Update the parameters of a group that have a gradient; their state exists already."""

    def traced(self, group: dict[str, Any]) -> Traced | None:
        """Return all tensors that an update of the group changes, for a graph; None if no graph
        can hold the update."""
        return None


def call_closure(closure: Callable[[], float] | None) -> float | None:
    """Return the loss that `closure` computes, with gradients enabled as in torch's optimizers;
    None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _is_allowed(value: Any, allowed: str) -> bool:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    return (
        math.isfinite(number)
        and number >= 0
        and not (allowed == MORE_THAN_0 and number == 0)
        and not (allowed == BELOW_1 and number >= 1)
    )


@dataclass(frozen=True)
class GroupWithState:
    """A group of a `ByGroup` optimizer with its state created, so that a checkpoint can be restored
    into it in place."""

    optimizer: ByGroup
    group: dict[str, Any]

    def __post_init__(self) -> None:
        self.optimizer.create_state(self.group)

    def step(self, lr: float | Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        self.optimizer.step_group(self.group, lr, grad_scale, found_inf)

    @property
    def tensors(self) -> Traced | None:
        return self.optimizer.traced(self.group)

    def is_current(self) -> bool:
        """Return True: the state is read from the optimizer at each update."""
        return True

    def count_traced(self, applied: Tensor) -> None:
        """Do nothing: each parameter has a separate step counter, which the graph has updated."""
