"""Conversion of module attributes to the form that a checkpoint stores, and back.

An attribute that refers to a parameter, a buffer or the tensor of a different attribute refers to
the same tensor after the restoration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.errors import RunFolderError
from surefoot.runtime.attributes.tracker import AttributeChanges
from surefoot.runtime.attributes.values import NOTHING, Aliases, find_owner, map_leaves

# "values" by name; "aliases": name of the tensor at each path; "grad": paths of trained tensors;
# "host": paths of CPU tensors; "deleted": names; "forms": as in AttributeChanges
Stored = dict[str, Any]


def encode_attributes(model: nn.Module, changed: AttributeChanges) -> Stored:
    """Return the changed attributes in the form that a checkpoint stores, with tensors detached.

    The result is empty if nothing has changed.
    """
    if not (changed.values or changed.deleted or changed.forms):
        return {}
    first = dict(changed.aliases.names)
    device = next((each.device.type for each in model.parameters()), "cpu")
    stored: Stored = {
        "values": {},
        "aliases": {},
        "grad": [],
        "host": [],
        "deleted": list(changed.deleted),
    } | ({"forms": dict(changed.forms)} if changed.forms else {})

    def keep(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in first:
            stored["aliases"][path] = first[id(leaf)]
            return None
        first[id(leaf)] = f"/{path}"  # no name of a parameter begins with a slash
        if leaf.requires_grad and leaf.is_leaf:
            stored["grad"].append(path)
        if leaf.device.type == "cpu" != device:
            stored["host"].append(path)
        return leaf.detach()

    for name, value in changed.values.items():
        stored["values"][name] = map_leaves(value, keep, name)
    return stored


def check_attributes(model: nn.Module, stored: Mapping[str, Any]) -> None:
    """Check that the model has the module of every stored attribute.

    Raises:
        RunFolderError: If a module is missing.
    """
    for name in stored.get("values", {}):
        if find_owner(model, name)[0] is None:
            raise RunFolderError(
                f"the checkpoint contains the attribute {name!r}, but the model has no such module",
                hint="resume the model that was saved",
            )


@torch.no_grad()
def put_back_attributes(
    model: nn.Module,
    stored: Mapping[str, Any],
    state: Mapping[str, Any] = NOTHING,
    *,
    keep_others: bool = False,
) -> None:
    """Restore the stored attributes of a model's modules.

    Args:
        model: The model.
        stored: The attributes, as `encode_attributes` returned them.
        state: Tensors by name that are saved outside the model and that attributes may refer to.
        keep_others: Skip attributes of modules that the model does not have, instead of raising.

    Raises:
        RunFolderError: If the model lacks the module of an attribute and `keep_others` is false.
    """
    if not stored:
        return
    if not keep_others:
        check_attributes(model, stored)
    known: dict[str, Any] = dict(Aliases.of(model, state).tensors)
    near = next((each.device for each in model.parameters()), torch.device("cpu"))

    def give(path: str, leaf: Any) -> Any:
        if path in stored["aliases"]:
            return known[stored["aliases"][path]]
        if isinstance(leaf, Tensor):
            leaf = leaf.to("cpu" if path in stored["host"] else near)
            leaf = _fill_trained(model, path, leaf) if path in stored["grad"] else leaf
            known[f"/{path}"] = leaf
        return leaf

    for name, value in stored["values"].items():
        owner, leaf = find_owner(model, name)
        if owner is not None:
            vars(owner)[leaf] = map_leaves(value, give, name)
    for name in stored["deleted"]:
        owner, leaf = find_owner(model, name)
        if owner is not None:
            vars(owner).pop(leaf, None)


def _fill_trained(model: nn.Module, path: str, saved: Tensor) -> Tensor:
    """Return a tensor that requires gradients and has the values of `saved`.

    An optimizer may refer to the present tensor at `path`. That tensor is filled if it has the
    shape and dtype of `saved`; otherwise `saved` itself is returned.
    """
    name, *keys = path.split("/")
    owner, leaf = find_owner(model, name)
    held = None if owner is None else vars(owner).get(leaf)
    for key in keys:
        if isinstance(held, dict):
            held = held.get(key)
        else:
            held = (
                held[int(key)]
                if isinstance(held, list | tuple) and key.isdigit() and int(key) < len(held)
                else None
            )
    if (
        isinstance(held, Tensor)
        and held.is_leaf
        and held.shape == saved.shape
        and held.dtype == saved.dtype
    ):
        return held.copy_(saved)
    return saved.requires_grad_()
