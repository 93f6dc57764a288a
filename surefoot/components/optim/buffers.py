"""The buffers that a step changes beside the weights, so that a skipped step moves nothing at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot.components.optim.fused import copy_tensors

Slot = tuple[nn.Module, str]


class LiveBuffers:
    """Keeps the buffers that a forward pass in training changes (the statistics of BatchNorm): one batch that is not a number
    would spoil them for good.

    Which ones they are is seen at the first step, and only they are copied from then on; one that changes for the first time later is
    not known.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
        self._moving: list[Slot] = []  # whose module puts another tensor in their place
        self._held: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._kinds: list[
            tuple[list[Tensor], list[Tensor]]
        ] = []  # copies and originals of one dtype each: one pass for all of them
        self._is_settled = not self._slots
        self._was_applied: bool | Tensor = True  # the step since `keep`

    def keep(self) -> None:
        """Take note of what they hold; called before each step."""
        if not self._is_settled:
            self._settle()
        elif self._moving:
            self._hold()
        for copies, held in self._kinds:
            copy_tensors(copies, held)
        self._was_applied = True

    def _settle(self) -> None:
        """At the first step every buffer is copied; after one that was applied those that stayed as they were are let go."""
        now = [getattr(module, name) for module, name in self._slots]
        if self._copies and self._was_applied:
            before = list(zip(self._slots, self._held, self._copies, now, strict=True))
            live = [
                (slot, held, tensor) for slot, held, copy, tensor in before if tensor is not held or not torch.equal(copy, tensor)
            ]
            self._slots = [slot for slot, _, _ in live]
            self._moving = [slot for slot, held, tensor in live if tensor is not held]
            self._is_settled = True
        self._copies = [getattr(module, name).detach().clone() for module, name in self._slots]
        self._hold()

    def _hold(self) -> None:
        self._held = [getattr(module, name) for module, name in self._slots]
        kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for copy, held in zip(self._copies, self._held, strict=True):
            copies, originals = kinds.setdefault(held.dtype, ([], []))
            copies.append(copy)
            originals.append(held)
        self._kinds = list(kinds.values())

    @torch.no_grad()
    def put_back_unless(self, applied: bool | Tensor) -> None:
        """Put back what `keep` saw, unless the step was applied; where that is known on the device only, it is decided there."""
        self._was_applied = applied
        if isinstance(applied, Tensor):
            for (module, name), copy in zip(self._slots, self._copies, strict=True):
                tensor = getattr(module, name)
                tensor.copy_(torch.where(applied, tensor, copy))
        elif not applied:
            for (module, name), tensor, copy in zip(self._slots, self._held, self._copies, strict=True):
                tensor.copy_(copy)
                if getattr(module, name) is not tensor:
                    setattr(module, name, tensor)
