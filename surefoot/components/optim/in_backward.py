"""Optimizer update inside the backward pass.

Each parameter is updated as soon as its gradient exists, and the gradient is freed. Therefore all
gradients never exist at the same time. This excludes gradient accumulation and clipping by the
global norm. If a gradient is non-finite, some parameters have been updated before this is known.
After Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources",
2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from surefoot.components.optim.fused import FusedGroup
from surefoot.components.optim.update import GuardedUpdate
from surefoot.core.errors import InputError, NumbersError


class UpdateInBackward:
    """Hooks that update each parameter in the backward pass, as soon as its gradient exists.

    Args:
        guarded: The optimizers and their schedule.

    Raises:
        InputError: For an optimizer other than torch's SGD, Adam and AdamW with fused=True.
    """

    def __init__(self, guarded: GuardedUpdate) -> None:
        if guarded.places() is None:
            raise InputError(
                "the update cannot run inside the backward pass with this optimizer",
                hint=(
                    "use torch.optim.SGD, Adam or AdamW with fused=True, or set "
                    "memory.update_in_backward = false"
                ),
            )
        guarded.on_device = False  # the host sets the learning rates and counts steps
        self._guarded = guarded
        self._places: dict[int, tuple[FusedGroup, int]] = {}
        self._norms: list[Tensor] = []
        self._is_on = False
        self._hooked: set[Tensor] = set()
        self._hook()

    def _hook(self) -> None:
        """Add the update hook to each parameter that has none, since groups may have been added."""
        for parameter in self._guarded.parameters:
            if parameter not in self._hooked:
                self._hooked.add(parameter)
                register: Any = parameter.register_post_accumulate_grad_hook
                register(self._update)

    def step(self, run_backward: Callable[[], None]) -> float:
        """Run the backward pass with its updates, and return the global norm of the gradients.

        Raises NumbersError for a non-finite gradient. Its parameter is unchanged, but other
        parameters have been updated.
        """
        guarded = self._guarded
        guarded.move_schedule()
        self.run(run_backward)
        norm = float(torch.linalg.vector_norm(torch.stack(self._norms))) if self._norms else 0.0
        if not math.isfinite(norm):
            raise NumbersError(
                (
                    "a gradient is non-finite, but the update inside the backward pass has "
                    "already updated some parameters"
                ),
                hint=(
                    "surefoot resume RUN resumes from the newest checkpoint; "
                    "memory.update_in_backward = false can skip such a step"
                ),
            )
        guarded.applied_steps += 1
        return norm

    def run(self, run_backward: Callable[[], None]) -> None:
        """Run the backward pass, and update each parameter with the `lr` of its group."""
        self._hook()
        self._places = self._guarded.places() or {}  # read again: a resume replaces the groups
        self._norms, self._is_on = [], True
        try:
            run_backward()
        finally:
            self._is_on = False

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        if not self._is_on or parameter.grad is None:
            return
        group, place = self._places[id(parameter)]
        norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        self._norms.append(norm)
        group.step_one(place, group.group["lr"], (~torch.isfinite(norm)).float())
        parameter.grad = None
