"""Detection of module attributes that have changed since the model was built.

Only these attributes are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from surefoot.runtime.attributes.values import (
    NOTHING,
    Aliases,
    find_leaves,
    find_owner,
    is_state,
    named_attributes,
    read_forms,
    sign,
)


@dataclass(frozen=True)
class AttributeChanges:
    """Attributes of a model's modules that have changed since the model was built.

    Args:
        aliases: Index of the tensors that are saved anyway, such as parameters.
        values: Changed attributes by dotted name.
        deleted: Names of deleted attributes.
        unsaved: Names and types of changed attributes that cannot be saved.
        forms: Buffers whose shape or dtype has changed, or that were set to None or to a tensor.
            The value is True if the buffer is a tensor now.
    """

    aliases: Aliases
    values: dict[str, Any]
    deleted: tuple[str, ...]
    unsaved: tuple[str, ...]
    forms: Mapping[str, bool] = field(default_factory=dict)


class AttributeTracker:
    """Tracker that finds the module attributes that have changed since the model was built.

    An attribute that never changes, such as a table of sines or a setting, is created again with
    the model and need not be saved. An attribute that changes is state: a hidden state, a counter,
    or values computed from the first batch.
    """

    def __init__(
        self, model: nn.Module, state: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        """Record the present attributes of the modules.

        The tensors that `state` returns are saved separately; an attribute may refer to one of
        them.
        """
        self._model = model
        aliases = Aliases.of(model, {} if state is None else state())
        self._forms = read_forms(model)
        self._before = {
            name: sign(value, aliases) for name, value in named_attributes(model).items()
        }

    def find_changed(self, state: Mapping[str, Any] = NOTHING) -> AttributeChanges:
        """Return the attributes that have changed since this tracker was created.

        The objects in `state` are saved separately, so that they are not listed as `unsaved`.
        """
        held = {id(each) for each in state.values()}
        aliases = Aliases.of(self._model, state)
        now = named_attributes(self._model)
        values, unsaved = dict[str, Any](), list[str]()
        for name, value in now.items():
            signed = sign(value, aliases)
            if signed == self._before.get(name, MISSING if signed is not None else None):
                continue
            if is_state(value) and not _is_view(value, aliases):
                values[name] = value
            # otherwise it holds no known tensor
            elif (
                signed is not None
                and id(value) not in held
                and not _is_in_state_dict(self._model, name, aliases)
            ):
                unsaved.append(f"{name} ({type(value).__name__})")
        deleted = [
            name for name, signed in self._before.items() if signed is not None and name not in now
        ]
        forms = {
            name: form is not None
            for name, form in read_forms(self._model).items()
            if form != self._forms.get(name, MISSING)
        }
        return AttributeChanges(aliases, values, tuple(deleted), tuple(unsaved), forms)


MISSING = object()


def _is_in_state_dict(model: nn.Module, name: str, aliases: Aliases) -> bool:
    """Return whether the state dict of a module already contains an attribute.

    Only modules with their own `get_extra_state` or `_save_to_state_dict` are tested: the module of
    the attribute and those around it. The attribute is in a state dict that changes, or cannot be
    made, while the attribute is removed.
    """
    owner, leaf = find_owner(model, name)
    parts = name.split(".")[:-1]
    around = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)]
    writers = [each for each in around if _writes_state_dict(type(each))]
    if owner is None or not writers:
        return False
    before, value = [_sign_state(each, aliases) for each in writers], vars(owner)[leaf]
    vars(owner)[leaf] = MISSING
    try:
        return before != [_sign_state(each, aliases) for each in writers]
    except Exception:  # noqa: BLE001 - as user code fails without what it reads
        return True
    finally:
        vars(owner)[leaf] = value


def _writes_state_dict(kind: type[nn.Module]) -> bool:
    return (kind.get_extra_state, kind._save_to_state_dict) != (
        nn.Module.get_extra_state,
        nn.Module._save_to_state_dict,
    )


def _sign_state(module: nn.Module, aliases: Aliases) -> Any:
    """Return a value that changes if the entries of a module in its state dict change."""
    held = dict[str, Any]()
    module._save_to_state_dict(held, "", True)
    return {name: sign(each, aliases) for name, each in held.items()}


def _is_view(value: Any, aliases: Aliases) -> bool:
    """Return whether a tensor in `value` is a view of a parameter or a buffer.

    Such a view cannot be saved, since it would be restored as a separate tensor.
    """
    tensors = (each for each in find_leaves(value) or () if isinstance(each, Tensor))
    return any(id(each) not in aliases.names and aliases.is_alias(each) for each in tensors)
