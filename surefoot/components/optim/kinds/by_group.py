"""Base class of optimizers whose parameter groups can be updated one at a time.

The update of a group can also unscale the gradients and skip itself.
"""

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
    """Base class of optimizers that update each parameter group with `step_group`.

    If a group has `fused=True`, its update can divide the gradients by `grad_scale`, and skip
    itself if `found_inf` is 1. Raises SpecError for a setting outside its valid range, such as a
    negative learning rate.
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

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient, and return the loss of `closure`.

        `closure` computes the loss again before the update. Without it, None is returned.
        """
        loss = call_closure(closure)
        for group in self.param_groups:
            self.step_group(group, group["lr"])
        return loss

    @abstractmethod
    def create_state(self, group: dict[str, Any]) -> None:
        """Create the missing optimizer state of the parameters in a group."""

    @torch.no_grad()
    def step_group(
        self,
        group: dict[str, Any],
        lr: float | Tensor,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update the parameters of one group that have a gradient, with the learning rate `lr`.

        The gradients are divided by `grad_scale`, and nothing changes if `found_inf` is 1. Both
        must be None for a group that is not fused.
        """
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
        """Update `params` of a group with their gradients `grads`.

        All of them have a gradient and optimizer state. The other arguments are those of
        `step_group`.
        """

    def traced(self, group: dict[str, Any]) -> Traced | None:
        """Return all tensors that an update of the group changes, for a compiled step.

        These are five lists: parameters, step counters, first moments, second moments and momentum
        buffers. None means that the update cannot be part of a compiled graph.
        """
        return None


def call_closure(closure: Callable[[], float] | None) -> float | None:
    """Call `closure` with gradients enabled, as torch's optimizers do, and return its loss.

    Returns None without a closure.
    """
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
    """Parameter group of a `ByGroup` optimizer, whose state is created at once.

    A checkpoint can then be restored into this state in place.
    """

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
        """Return True, because the group reads its state from the optimizer at each update."""
        return True

    def count_traced(self, applied: Tensor) -> None:
        """Do nothing, because the compiled graph has already updated all step counters."""
