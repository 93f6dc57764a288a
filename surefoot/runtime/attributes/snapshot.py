"""Snapshot of the attributes of a model's modules, which restores objects and their values."""

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
    """Marker of an attribute that the module does not have."""


ABSENT = Absent()


class AttributeSnapshot:
    """References of all attributes, or of `slots`, and copies of mutable values in them.

    Tensors, arrays and containers are copied.
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
        """Return copies of the mutable state in a value; None for any other value."""
        if isinstance(value, Tensor):
            return None if self.aliases.is_alias(value) else value.detach().clone()
        if isinstance(value, np.ndarray):
            return value.copy()
        if parts_of(value) is None or not is_state(value):
            return None
        return [(key, part, self._copy(part)) for key, part in parts_of(value) or ()]

    def find_changed(self) -> list[Slot]:
        """Return the attributes that are state and differ from the snapshot."""
        changed = [slot for slot, value, copy in self._held if self._differs(*slot, value, copy)]
        return [*changed, *self.new_state()]

    def restrict(self, slots: Iterable[Slot]) -> AttributeSnapshot:
        """Return the snapshot of `slots` alone; attributes that it does not hold are absent."""
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

        False if code has created an object that is not state, such as a compiled function.
        """
        return holds_tensors(value) or now is ABSENT or is_state(now)

    def restorable_attributes(self) -> Iterator[tuple[Slot, Any, Any]]:
        """Yield every attribute that is to be restored, with its old object and the copies."""
        for slot, value, copy in self._held:
            now = vars(slot[0]).get(slot[1], ABSENT)
            if now is value or self._is_ours(now, value):
                yield slot, value, copy

    def new_state(self) -> list[Slot]:
        """Return the attributes that were added since the snapshot and are state."""
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
        """Restore every attribute's object and values; delete added attributes that are state."""
        for slot in self.new_state():
            _assign(slot, ABSENT)
        for slot, value, copy in list(self.restorable_attributes()):
            _assign(slot, value)
            restore_value(value, copy)

    def lend(self) -> AbstractContextManager[None]:
        """Return a reusable context in which the attributes hold copies with the old values."""
        return _RestoredAttributes(self)

    @torch.no_grad()
    def restore_unless(self, applied: Tensor) -> None:
        """Restore the attributes if `applied` is false, decided on its device.

        The host waits for the device if more has changed than the values of tensors: a shape, a
        number, an array, or which buffer an attribute refers to.
        """
        now = {slot: vars(slot[0]).get(slot[1], ABSENT) for slot, _, _ in self._held}
        if not all(self._is_chosen(now[slot], value, copy) for slot, value, copy in self._held):
            if not bool(applied):
                self.put_back()
            return
        for slot, _, copy in self._held:
            _assign(slot, _choose(applied, now[slot], copy))

    def _is_chosen(self, now: Any, before: Any, copy: Any) -> bool:
        """Return whether `_choose` restores a value: nothing but values of its tensors changed."""
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
    if value is ABSENT:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value


def _copy_of_old_value(value: Any, copy: Any) -> Any:
    """Return an attribute's old value in mutable copies; a tensor in a graph stays as it is."""
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
    """Return whether a tensor is dense and has the shape, dtype and device of its copy."""
    return (
        now is not None
        and copy is not None
        and now.layout is copy.layout is torch.strided
        and (now.shape, now.dtype, now.device) == (copy.shape, copy.dtype, copy.device)
    )


def _choose(applied: Tensor, now: Any, copy: Any) -> Any:
    """Return a value that is `now` if `applied`, else the copy."""
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
    """Return whether a value has changed in place since it was copied."""
    if copy is None:
        return False
    if isinstance(value, Tensor):
        try:
            return not (
                value.shape == copy.shape and value.dtype == copy.dtype and torch.equal(value, copy)
            )
        except (RuntimeError, NotImplementedError):
            # a tensor without values, in a trace of sizes alone
            return True
    if isinstance(value, np.ndarray):
        return bool(value.shape != copy.shape or value.tobytes() != copy.tobytes())
    now = list(parts_of(value) or ())
    if len(now) != len(copy):
        return True
    return any(
        key != old_key or part is not old or is_changed(part, of_part)
        for (key, part), (old_key, old, of_part) in zip(now, copy, strict=True)
    )


def restore_value(value: Any, copy: Any) -> None:
    """Restore the values of tensors and arrays, and the parts of containers, in place."""
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
