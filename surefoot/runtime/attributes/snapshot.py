"""Snapshot of the plain attributes of a model's modules, from which they can be restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.runtime.attributes.values import (
    Aliases,
    Slot,
    attributes_of,
    holds_tensors,
    is_same,
    is_state,
    parts_of,
    rebuild,
    sign,
)


class Absent:
    """Type of the marker `ABSENT`, which stands for an attribute that a module does not have."""


ABSENT = Absent()


class AttributeSnapshot:
    """Snapshot of the plain attributes of a model's modules.

    For each attribute it holds a reference to the object, and copies of the tensors, arrays and
    containers in it. Parameters, buffers and their views are not copied.

    Args:
        model: The model.
        slots: Pairs of a module and an attribute's name; None for all attributes.
        aliases: Index of the parameters and buffers; None to create it.
    """

    def __init__(
        self, model: nn.Module, slots: Iterable[Slot] | None = None, aliases: Aliases | None = None
    ) -> None:
        self._model = model
        self.aliases = Aliases.of(model) if aliases is None else aliases
        self._is_whole = slots is None
        found: Iterable[Slot] = (
            ((module, name) for module in model.modules() for name in attributes_of(module))
            if slots is None
            else slots
        )
        self._held = [
            (slot, value, self._copy(value))
            for slot in found
            for value in [vars(slot[0]).get(slot[1], ABSENT)]
        ]

    def _copy(self, value: Any) -> Any:
        """Return copies of the tensors, arrays and containers in a value; None if it has none."""
        if isinstance(value, Tensor):
            return None if self.aliases.is_alias(value) else value.detach().clone()
        if isinstance(value, np.ndarray):
            return value.copy()
        if parts_of(value) is None or not is_state(value):
            return None
        return [(key, part, self._copy(part)) for key, part in parts_of(value) or ()]

    def find_changed(self) -> list[Slot]:
        """Return the attributes that differ from the snapshot, including added ones.

        An attribute is ignored if it now holds an object that cannot be saved, such as a compiled
        function.
        """
        changed = [slot for slot, value, copy in self._held if self._differs(*slot, value, copy)]
        return [*changed, *self.new_state()]

    def restrict(self, slots: Iterable[Slot]) -> AttributeSnapshot:
        """Return a snapshot of `slots` only.

        An attribute that this snapshot lacks is recorded as absent, so that restoring deletes it.
        """
        held = {slot: (value, copy) for slot, value, copy in self._held}
        made = AttributeSnapshot(self._model, (), self.aliases)
        made._held = [(slot, *held.get(slot, (ABSENT, None))) for slot in slots]
        return made

    def _differs(self, module: nn.Module, name: str, value: Any, copy: Any) -> bool:
        now = vars(module).get(name, ABSENT)
        if now is not value:
            return self._is_ours(now, value) and not (
                copy is None and parts_of(value) is None and is_same(now, value)
            )
        return is_changed(value, copy)

    def _is_ours(self, now: Any, value: Any) -> bool:
        """Return whether an attribute is to be restored.

        It is not if code has replaced it by an object that cannot be saved, such as a compiled
        function, unless the old value held tensors.
        """
        return holds_tensors(value) or now is ABSENT or is_state(now)

    def restorable_attributes(self) -> Iterator[tuple[Slot, Any, Any]]:
        """Yield each attribute that `put_back` restores, with its old object and copies."""
        for slot, value, copy in self._held:
            now = vars(slot[0]).get(slot[1], ABSENT)
            if now is value or self._is_ours(now, value):
                yield slot, value, copy

    def new_state(self) -> list[Slot]:
        """Return the attributes that were added since the snapshot and can be saved as state.

        The list is empty for a snapshot of selected attributes.
        """
        if not self._is_whole:
            return []
        known = {slot for slot, _, _ in self._held}
        now = (
            ((module, name), value)
            for module in self._model.modules()
            for name, value in attributes_of(module).items()
        )
        return [slot for slot, value in now if slot not in known and is_state(value)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the objects and the values of all attributes in the snapshot.

        Attributes that were added since the snapshot are deleted if they can be saved as state.
        """
        for slot in self.new_state():
            _assign(slot, ABSENT)
        for slot, value, copy in list(self.restorable_attributes()):
            _assign(slot, value)
            restore_value(value, copy)

    def lend(self) -> AbstractContextManager[None]:
        """Return a reusable context in which the attributes have their values of the snapshot.

        Inside the context the attributes hold copies; on exit they get back the objects that they
        had before.
        """
        return _RestoredAttributes(self)

    @torch.no_grad()
    def restore_unless(self, applied: Tensor) -> None:
        """Restore the attributes if the boolean tensor `applied` is false.

        If only the values of tensors have changed, the choice is made on the device, and the host
        does not wait for it. The host waits if a shape, a number or an array has changed, or if an
        attribute refers to a different buffer.
        """
        now = {slot: vars(slot[0]).get(slot[1], ABSENT) for slot, _, _ in self._held}
        if not all(self._is_chosen(now[slot], value, copy) for slot, value, copy in self._held):
            if not bool(applied):
                self.put_back()
            return
        for slot, _, copy in self._held:
            _assign(slot, _choose(applied, now[slot], copy))

    def _is_chosen(self, now: Any, before: Any, copy: Any) -> bool:
        """Return whether `_choose` can restore a value: only values of its tensors have changed."""
        if isinstance(now, Tensor) and isinstance(before, Tensor):
            aliases = self.aliases
            if aliases.is_alias(now) or aliases.is_alias(before):
                return now is before or sign(now, aliases) == sign(before, aliases)
            return lie_alike(now, copy)
        parts = parts_of(now)
        if parts is None or parts_of(before) is None:
            if not self._is_ours(now, before):
                return True
            return not is_changed(before, copy) and (now is before or is_same(now, before))
        held, kept = list(parts), copy or []
        return [key for key, _ in held] == [key for key, _, _ in kept] and all(
            self._is_chosen(part, old, of_part)
            for (_, part), (_, old, of_part) in zip(held, kept, strict=True)
        )


class _RestoredAttributes(AbstractContextManager[None]):
    def __init__(self, snapshot: AttributeSnapshot) -> None:
        self._snapshot = snapshot
        self._now: list[tuple[Slot, Any]] = []

    def __enter__(self) -> None:
        then: dict[Slot, Any] = dict.fromkeys(self._snapshot.new_state(), ABSENT)
        then |= {
            slot: _copy_of_old_value(value, copy)
            for slot, value, copy in self._snapshot.restorable_attributes()
        }
        self._now = [(slot, vars(slot[0]).get(slot[1], ABSENT)) for slot in then]
        for slot, value in then.items():
            _assign(slot, value)

    def __exit__(self, *error: object) -> None:
        for slot, value in self._now:
            _assign(slot, value)


def _assign(slot: Slot, value: Any) -> None:
    module, name = slot
    held: dict[str, Any] = module.__dict__
    if value is ABSENT:
        held.pop(name, None)
    else:
        held[name] = value


def _copy_of_old_value(value: Any, copy: Any) -> Any:
    """Return the old value of an attribute, with its tensors, arrays and containers copied.

    A tensor that requires gradients is copied only if it has changed.
    """
    if copy is None:
        return value
    if isinstance(value, Tensor):
        return value if value.requires_grad and not is_changed(value, copy) else copy.clone()
    return (
        copy.copy()
        if isinstance(value, np.ndarray)
        else rebuild(value, [(key, _copy_of_old_value(part, own)) for key, part, own in copy])
    )


def lie_alike(now: Tensor | None, copy: Tensor | None) -> bool:
    """Return whether `now` and `copy` are strided tensors of the same shape, dtype and device."""
    return (
        now is not None
        and copy is not None
        and now.layout is copy.layout is torch.strided
        and (now.shape, now.dtype, now.device) == (copy.shape, copy.dtype, copy.device)
    )


def _choose(applied: Tensor, now: Any, copy: Any) -> Any:
    """Return `now` if the boolean tensor `applied` is true, else `copy`; the device chooses."""
    if isinstance(now, Tensor):
        return now if copy is None else torch.where(applied.to(now.device), now, copy)
    parts = parts_of(now)
    if parts is None:
        return now
    return rebuild(
        now,
        [
            (key, _choose(applied, part, own))
            for (key, part), (_, _, own) in zip(parts, copy, strict=True)
        ],
    )


def is_changed(value: Any, copy: Any) -> bool:
    """Return whether `value` has changed in place since `copy` was made of it."""
    if copy is None:
        return False
    if isinstance(value, Tensor):
        try:
            return not (
                value.shape == copy.shape and value.dtype == copy.dtype and torch.equal(value, copy)
            )
        except (RuntimeError, NotImplementedError):
            # a tensor without values, in a trace of shapes only
            return True
    if isinstance(value, np.ndarray):
        return bool(value.shape != copy.shape or value.tobytes() != copy.tobytes())
    now = list(parts_of(value) or ())
    if len(now) != len(copy):
        return True
    return any(
        (key is not old_key and key != old_key) or part is not old or is_changed(part, of_part)
        for (key, part), (old_key, old, of_part) in zip(now, copy, strict=True)
    )


def restore_value(value: Any, copy: Any) -> None:
    """Restore tensors, arrays and containers in place from the copies in a snapshot."""
    if copy is None or not is_changed(value, copy):
        # writing to a tensor of a graph, even the same values, would break its backward pass
        return
    if isinstance(value, Tensor):
        if value.shape == copy.shape and value.dtype == copy.dtype:
            value.copy_(copy)
        else:
            value.data = copy.clone()
    elif isinstance(value, np.ndarray):
        value[...] = copy
    else:
        for _, part, of_part in copy:
            restore_value(part, of_part)
        if isinstance(value, dict):
            value.clear()
            value.update((key, part) for key, part, _ in copy)
        elif isinstance(value, list | deque):
            value.clear()
            value.extend(part for _, part, _ in copy)
