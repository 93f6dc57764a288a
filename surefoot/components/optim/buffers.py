"""The buffers that a step changes beside the weights, so that a skipped step moves nothing at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot.components.optim.fused import copy_tensors


class LiveBuffers:
    """Keeps the buffers that a forward pass in training changes (the statistics of BatchNorm): one batch that is not a number
    would spoil them for good.

    Which ones they are is seen at the first step, and only they are copied from then on; one that changes for the first time later is
    not known.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
        self._held: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._is_settled = not self._slots

    def keep(self) -> None:
        """Take note of what they hold; called before each step."""
        if not self._is_settled:
            self._settle()
        if self._slots:
            self._held = self._now()
            copy_tensors(self._copies, self._held)

    def _now(self) -> list[Tensor]:
        return [getattr(module, name) for module, name in self._slots]

    def _settle(self) -> None:
        """At the first step every buffer is copied, at the second those that stayed as they were are let go."""
        now = self._now()
        if self._copies:
            changed = [not torch.equal(copy, tensor) for copy, tensor in zip(self._copies, now, strict=True)]
            self._slots = [slot for slot, is_live in zip(self._slots, changed, strict=True) if is_live]
            self._copies = [copy for copy, is_live in zip(self._copies, changed, strict=True) if is_live]
            self._is_settled = True
        else:
            self._copies = [tensor.detach().clone() for tensor in now]

    @torch.no_grad()
    def put_back_unless(self, applied: bool | Tensor) -> None:
        """Put back what `keep` saw, unless the step was applied; where that is known on the device only, it is decided there."""
        if isinstance(applied, Tensor):
            for tensor, copy in zip(self._now(), self._copies, strict=True):
                tensor.copy_(torch.where(applied, tensor, copy))
        elif not applied:
            for (module, name), tensor, copy in zip(self._slots, self._held, self._copies, strict=True):
                tensor.copy_(copy)
                if getattr(module, name) is not tensor:  # a module may have put another tensor in its place
                    setattr(module, name, tensor)
