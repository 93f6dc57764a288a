"""Restoration of the buffers and attributes of a block while it is recomputed.

The recomputation sees them as they were in the forward pass.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn

from surefoot.runtime.attributes.snapshot import AttributeSnapshot

Slot = tuple[nn.Module, str]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Buffers:
    """Buffers and attributes that the forward pass of a block changes.

    A block is a module that is recomputed in the backward pass. Examples of such buffers and
    attributes are BatchNorm statistics and a hidden state. While the block is recomputed, they have
    the values from before its forward pass. Afterwards, they get back the values from before the
    recomputation. The first forward pass in each combination of train and eval modes of the block's
    modules shows which of them change. Later passes copy only those.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self._modules = block, list(block.modules())
        self._slots = [
            (module, name)
            for module in self._modules
            for name, _ in module.named_buffers(recurse=False)
        ]
        self._moving: dict[tuple[bool, ...], list[Slot]] = {}
        self._attributes: dict[tuple[bool, ...], list[Slot]] = {}

    def tensors(self) -> list[Tensor]:
        """Return the current buffers of the block."""
        return [getattr(*slot) for slot in self._slots]

    def with_copies(self) -> AbstractContextManager[Any]:
        """Return a context inside which the block uses copies of all its buffers and attributes.

        The originals are put back at the end of the context.
        """
        return CombinedContext(
            _RestoredBuffers(self._slots, self.tensors()), AttributeSnapshot(self._block).lend()
        )

    def contexts(self) -> Contexts | None:
        """Return a context for the forward pass of the block, and one for its recomputation.

        With both, the recomputation sees the buffers and attributes of the forward pass. Returns
        None if the forward pass changes none of them.
        """
        modes = tuple(module.training for module in self._modules)
        slots = self._moving.get(modes, self._slots)
        known = self._attributes.get(modes)
        if not slots and known == []:
            return None
        before = [getattr(*slot).detach().clone() for slot in slots]
        attributes = AttributeSnapshot(self._block, known)
        watched = _ChangeDetector(self, modes, slots, before, attributes)
        return watched, CombinedContext(_RestoredBuffers(slots, before), attributes.lend())

    def record_changes(
        self, modes: tuple[bool, ...], moving: list[Slot], attributes: list[Slot]
    ) -> None:
        self._moving.setdefault(modes, moving)
        self._attributes.setdefault(modes, attributes)


class _ChangeDetector(AbstractContextManager[None]):
    def __init__(
        self,
        buffers: Buffers,
        modes: tuple[bool, ...],
        slots: list[Slot],
        before: list[Tensor],
        attributes: AttributeSnapshot,
    ) -> None:
        self._buffers, self._modes, self._slots, self._before, self._attributes = (
            buffers,
            modes,
            slots,
            before,
            attributes,
        )

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            moving = [
                slot
                for slot, copy in zip(self._slots, self._before, strict=True)
                if _has_moved(copy, getattr(*slot))
            ]
            self._buffers.record_changes(self._modes, moving, self._attributes.find_changed())


class _RestoredBuffers(AbstractContextManager[None]):
    def __init__(self, slots: list[Slot], before: list[Tensor]) -> None:
        self._slots, self._before = slots, before
        self._now: list[Tensor] = []

    def __enter__(self) -> None:
        self._now = [getattr(*slot) for slot in self._slots]
        for slot, copy in zip(self._slots, self._before, strict=True):
            # a second backward pass over the same graph starts from the same values
            setattr(*slot, copy.clone())

    def __exit__(self, *error: object) -> None:
        for slot, tensor in zip(self._slots, self._now, strict=True):
            setattr(*slot, tensor)


class CombinedContext(AbstractContextManager[None]):
    """Combination of several contexts, which may be entered again after it has ended."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:  # type: ignore[override]
        for context in self._contexts:
            self._stack.enter_context(context)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _has_moved(before: Tensor, now: Tensor) -> bool:
    try:
        return before.shape != now.shape or not torch.equal(before, now)
    except RuntimeError:  # a fake tensor, which has no values
        return True
