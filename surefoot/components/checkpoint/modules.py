"""What a module holds, for a commit: tensors that are read in place, what its state dict makes when it is asked, and hidden buffers.

A state dict may hold more than the module's own tensors (`get_extra_state`, hooks of a layer's own) and less (buffers that are not
persistent, which yet decide how a loop goes on).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from surefoot.components.checkpoint.tensors import check_storable, fill
from surefoot.components.checkpoint.tree import split
from surefoot.core.errors import RunFolderError, TaskError
from surefoot.runtime.attributes import Changed, Stored, encode_attributes


class Held(NamedTuple):
    """The module's own tensors as they live, by their names in its state dict; what else that holds; the buffers that it leaves out."""

    tensors: dict[str, Tensor]
    extra: dict[str, Any]
    buffers: dict[str, Tensor]


def held_by(module: nn.Module) -> Held:
    """All that a module holds. Raises TaskError for a lazy layer that has no tensors yet."""
    for name, each in chain(module.named_parameters(), module.named_buffers()):
        check_shaped(name, each)
    own = [*module.parameters(), *module.buffers()]
    known = {id(each) for each in own}
    places: set[tuple[Any, ...]] | None = None
    state = module.state_dict(keep_vars=True)
    tensors, extra = dict[str, Tensor](), dict[str, Any]()
    for name, value in state.items():
        is_own = id(value) in known
        if isinstance(value, Tensor) and not is_own:  # a hook may have detached it
            places = {_place(each) for each in own} if places is None else places
            is_own = _place(value) in places
        (tensors if is_own else extra)[name] = value
    return Held(tensors, extra, {name: buffer for name, buffer in module.named_buffers() if name not in state})


def check_shaped(name: str, tensor: Tensor) -> None:
    """Raise TaskError for a tensor of a lazy layer that has seen no batch yet."""
    if is_lazy(tensor):
        raise TaskError(f"{name} has no shape yet: its layer is lazy", hint="run one batch through the model first")


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's numbers are; of one that is not dense, which tensor it is."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (id(tensor),)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def check_buffers(module: nn.Module, names: Iterable[str]) -> None:
    """Raise RunFolderError where `put_back_buffers` would find no layer for one of these."""
    for name in names:
        above, _, leaf = name.rpartition(".")
        try:
            owner = module.get_submodule(above)
        except AttributeError:
            owner = None
        if owner is None or (leaf not in owner._buffers and hasattr(owner, leaf)):
            raise RunFolderError(
                f"the commit holds the buffer {name!r}, and the model has no place for it",
                hint="go on with the model that was saved",
            )


@torch.no_grad()
def put_back_buffers(module: nn.Module, saved: Mapping[str, Tensor], *, keep_others: bool = False) -> None:
    """Give a module the hidden buffers that were saved: each into its own, or in place of none, as where a forward pass makes it.

    One of another shape or dtype is taken as it was, or with `keep_others` left as it is (cast where only the dtype is another).
    """
    for name, value in saved.items():
        above, _, leaf = name.rpartition(".")
        owner = module.get_submodule(above)
        held = owner._buffers.get(leaf)
        near = held if held is not None else next(module.parameters(), value)
        if held is not None and held.shape == value.shape and (keep_others or held.dtype == value.dtype):
            fill(name, held, value)
        elif leaf not in owner._buffers:
            owner.register_buffer(leaf, value.to(near.device), persistent=False)
        elif held is None or not keep_others:
            owner._buffers[leaf] = value.to(near.device)


def encode_storable(module: nn.Module, changed: Changed) -> tuple[Stored, tuple[str, ...]]:
    """The changed attributes that a checkpoint can hold, encoded, and the names of those that it cannot."""
    values, unsaved = {}, list(changed.unsaved)
    for name, value in changed.values.items():
        try:
            for place, tensor in split(value, name)[1].items():
                check_storable(place, tensor)
        except TaskError:
            unsaved.append(f"{name} ({type(value).__name__})")
        else:
            values[name] = value
    return encode_attributes(module, replace(changed, values=values)), tuple(unsaved)


def put_back_extra(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Give a module what else its state dict held, beside its own tensors as they are by now."""
    if extra:
        module.load_state_dict({**module.state_dict(), **extra}, strict=False)
