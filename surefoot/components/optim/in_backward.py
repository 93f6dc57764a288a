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

from surefoot.components.optim.fused import FusedGroup, has_step_hooks, reason_not_fused
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.state import run_last
from surefoot.core.errors import InputError, NumbersError


class UpdateInBackward:
    """Hooks that update each parameter in the backward pass, as soon as its gradient exists.

    Args:
        guarded: The optimizers and their schedule.

    Raises:
        InputError: For an optimizer other than torch's SGD, Adam and AdamW with fused=True.
    """

    def __init__(self, guarded: GuardedUpdate) -> None:
        self._guarded = guarded
        self._places = self._find_places()
        guarded.on_device = False  # the host sets the learning rates and counts steps
        self._norms: list[Tensor] = []
        self._is_on = False
        self._hooks: dict[Tensor, int] = {}  # parameter -> id of its update hook
        self._hook()

    def _hook(self) -> None:
        """Add the update hook to each parameter that has none, since groups may have been added.

        It runs after the hooks that a loop has added, because it frees the gradient.
        """
        for parameter in self._guarded.parameters:
            hook = self._hooks.get(parameter)
            if hook is None:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks[parameter] = register(self._update).id
            else:
                run_last(parameter, hook)

    def _find_places(self) -> dict[int, tuple[FusedGroup, int]]:
        """Return the fused group of each parameter, and its index in that group, by its `id`."""
        places = self._guarded.places()
        if places is not None:
            return places
        hooked = next(filter(has_step_hooks, self._guarded.optimizers), None)
        which = "this optimizer" if hooked is None else type(hooked).__name__
        why = "" if hooked is None else reason_not_fused(hooked)
        use = "use torch.optim.SGD, Adam or AdamW with fused=True"
        raise InputError(
            f"the update cannot run inside the backward pass with {which}{why}",
            hint=f"{use if hooked is None else 'remove the hooks'}, or set "
            "memory.update_in_backward = false",
        )

    def step(self, run_backward: Callable[[], object]) -> float:
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

    def run(self, run_backward: Callable[[], object]) -> None:
        """Run the backward pass, and update each parameter with the `lr` of its group."""
        self._hook()
        self._places = self._find_places()  # read again: a resume replaces the groups
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
