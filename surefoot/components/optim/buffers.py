"""Restoration of the buffers and attributes that the forward pass of a skipped step changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from surefoot.components.optim.fused import copy_tensors
from surefoot.runtime.attributes.snapshot import (
    AttributeSnapshot,
    is_changed,
    lie_alike,
    restore_value,
)

Slot = tuple[nn.Module, str]


class LiveBuffers:
    """Copies of a model's buffers and attributes, which are restored if a step is skipped.

    In training, a forward pass changes buffers (BatchNorm statistics) and attributes of modules (a
    hidden state). One batch with NaN would make them non-finite for good. The first step shows
    which of them change. Later steps copy only those, so a buffer that changes for the first time
    after the first step is not restored.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = [(module, name) for module in model.modules() for name in module._buffers]
        # buffers that a pass replaces by a different tensor, sets or removes, or that are sparse
        self._moving: list[Slot] = []
        # the tensor in each slot, or None
        self._held: list[Any] = []
        self._copies: list[Any] = [None] * len(self._slots)
        # copies and originals by dtype: one kernel for all of one dtype
        self._kinds: list[tuple[list[Tensor], list[Tensor]]] = []
        self._is_settled = not self._slots
        self._model = model
        self._attributes: AttributeSnapshot | None = None
        self._attribute_slots: list[Slot] | None = None  # None until the first step is over

    def keep(self) -> None:
        """Copy the buffers and attributes of the model; must be called before each step."""
        if self._attribute_slots != []:  # empty for most models
            self._keep_attributes()
        if not self._is_settled or self._moving:
            self._hold([getattr(*slot) for slot in self._slots])
        for copies, held in self._kinds:
            copy_tensors(copies, held)

    def _keep_attributes(self) -> None:
        self._settle_attributes()
        if self._attributes is None:
            self._attributes = AttributeSnapshot(self._model)
        elif self._attribute_slots:
            self._attributes = AttributeSnapshot(
                self._model, self._attribute_slots, self._attributes.aliases
            )

    def _settle_attributes(self) -> None:
        """Determine which attributes a step changes; this happens once, after the first step."""
        if self._attribute_slots is None and self._attributes is not None:
            self._attribute_slots = self._attributes.find_changed()
            self._attributes = self._attributes.restrict(self._attribute_slots)

    def _drop_unchanged(self) -> None:
        """Stop copying the buffers that the first step has not changed.

        This is called once, after the first step, whether or not that step was applied.
        """
        every = zip(self._slots, self._held, self._copies, strict=True)
        live = [
            (slot, held, copy)
            for slot, held, copy in every
            if getattr(*slot) is not held or is_changed(held, copy)
        ]
        self._slots = [slot for slot, _, _ in live]
        self._copies = [copy for _, _, copy in live]
        self._hold([held for _, held, _ in live])
        self._moving = [
            slot
            for slot, held, copy in live
            if getattr(*slot) is not held or not lie_alike(held, copy)
        ]
        self._is_settled = True

    def _hold(self, held: list[Any]) -> None:
        """Record the current buffers, and allocate a copy of each.

        An existing copy with the same shape, dtype and device is reused. `keep` fills the copies of
        dense buffers.
        """
        self._held = held
        self._copies = [
            each if each is None else copy if lie_alike(each, copy) else each.detach().clone()
            for each, copy in zip(held, self._copies, strict=True)
        ]
        kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for copy, original in zip(self._copies, held, strict=True):
            if lie_alike(original, copy):
                copies, originals = kinds.setdefault(original.dtype, ([], []))
                copies.append(copy)
                originals.append(original)
        self._kinds = list(kinds.values())

    @torch.no_grad()
    def restore_unless(self, applied: bool | Tensor) -> None:
        """Restore the buffers and attributes that `keep` copied, unless the step was applied.

        If `applied` is a tensor, the choice is made on the device, and the host does not wait for
        it. It waits only if a buffer has a different shape, dtype or device than its copy.
        """
        self._settle_attributes()
        if not self._is_settled:
            self._drop_unchanged()
        now = [getattr(*slot) for slot in self._slots]
        if isinstance(applied, Tensor) and all(map(lie_alike, now, self._copies)):
            if self._attributes is not None:
                self._attributes.restore_unless(applied)
            for tensor, copy in zip(now, self._copies, strict=True):
                tensor.copy_(torch.where(applied, tensor, copy))
        elif not applied:  # the host waits where a buffer has another form than before
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers and attributes that `keep` copied, even in the middle of a step."""
        for (module, name), tensor, copy in zip(self._slots, self._held, self._copies, strict=True):
            restore_value(tensor, copy)
            if getattr(module, name) is not tensor:
                setattr(module, name, tensor)
        if self._attributes is not None:
            self._attributes.put_back()
        if self._attribute_slots is None:
            # an interrupted step does not show which attributes a complete one changes
            self._attributes = None
