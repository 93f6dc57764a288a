"""Attributes of a module that can hold state: tensors, arrays, plain values and containers.

Containers are lists, tuples, deques and dicts. A tensor that is a parameter, a buffer or a view of
one is an alias: its values are saved and restored with the parameter or buffer.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.runtime.attributes.generators import OF_TORCH, is_generator, sign_generator

LEAVES = (Tensor, np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))
# and namedtuples
SEQUENCES, MAPPINGS = {list, tuple, deque, torch.Size}, {dict, OrderedDict, defaultdict, Counter}
# of one attribute: a larger one is a table, and reading it would take longer than a step
MAX_VALUES = 10_000
Slot = tuple[Any, str]  # an object, such as a module, and the name of an attribute
NOTHING: Mapping[str, Any] = {}


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module, without parameters, buffers and submodules.

    The attributes that every `nn.Module` has are omitted, as are the weight list of an RNN and the
    values that a forward pre-hook of torch computes in each pass (`weight_norm`, `spectral_norm`,
    `prune`).
    """
    hooks = module._forward_pre_hooks.values()
    derived = {getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")}
    if isinstance(module, nn.RNNBase):
        derived |= {"_flat_weights", "_flat_weight_refs"}
    return {
        name: value
        for name, value in vars(module).items()
        if name not in OF_TORCH and name not in derived
    }


def small_attributes(owner: object) -> dict[str, Any]:
    """Return the attributes of an object, such as a task, that hold numbers, text or small tensors.

    Data is left out: values with more than MAX_VALUES entries, characters or elements. Tensors that
    require gradients, and objects, are left out too.
    """
    return {
        name: value
        # as a list: the thread that reads samples may add an attribute
        for name, value in list(getattr(owner, "__dict__", {}).items())
        if name not in OF_TORCH and _is_small(value)
    }


def _is_small(value: Any) -> bool:
    leaves = find_leaves(value)
    if leaves is None or any(isinstance(each, Tensor) and each.requires_grad for each in leaves):
        return False
    return sum(map(_count_elements, leaves)) <= MAX_VALUES


def _count_elements(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return leaf.numel()
    if isinstance(leaf, np.ndarray):
        return leaf.size
    return len(leaf) if isinstance(leaf, str | bytes) else 1


def parts_of(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return (index or key, value) of each entry of a container; None for other values.

    Containers of at most MAX_VALUES entries are copied first, because a thread that reads samples
    may change them.
    """
    if type(value) in MAPPINGS:
        return iter(tuple(value.items()) if len(value) <= MAX_VALUES else value.items())
    if type(value) in SEQUENCES or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return enumerate(tuple(value) if len(value) <= MAX_VALUES else value)
    return None


def rebuild(value: Any, keyed: Iterable[tuple[Any, Any]]) -> Any:
    """Return a container of the type of `value`, with entries from pairs of key and value."""
    if isinstance(value, dict):
        made = value.copy()  # keeps the default_factory of a defaultdict
        made.clear()
        for key, part in keyed:
            made[key] = part
        return made
    parts = [part for _, part in keyed]
    if isinstance(value, deque):
        return deque(parts, maxlen=value.maxlen)
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def find_leaves(value: Any) -> list[Any] | None:
    """Return all values inside `value` that are not containers, at any depth.

    Returns None if one of them is not a tensor, an array, a number, a string or None, or if there
    are more than MAX_VALUES values and containers.
    """
    left, found, count = [value], list[Any](), 0
    while left:
        each = left.pop()
        count += 1
        parts = parts_of(each)
        if parts is not None and count + len(each) <= MAX_VALUES:
            left.extend(part for _, part in parts)
        elif isinstance(each, LEAVES) and count <= MAX_VALUES:
            found.append(each)
        else:
            return None
    return found


def is_state(value: Any) -> bool:
    """Return whether a value can be saved as state.

    It can if `find_leaves` accepts it: it consists of tensors, arrays, numbers, strings and
    containers.
    """
    return find_leaves(value) is not None


def holds_tensors(value: Any) -> bool:
    """Return whether a value can be saved as state and contains a tensor or an array."""
    return any(isinstance(each, Tensor | np.ndarray) for each in find_leaves(value) or ())


@dataclass(frozen=True)
class Aliases:
    """Index of the tensors that are saved by name, which finds attributes that share their memory.

    Args:
        names: Name of each tensor by its `id`.
        memory: Name of each tensor by the device and address of its storage.
        tensors: The tensors by name.
    """

    names: dict[int, str]
    memory: dict[Any, str]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, more: Mapping[str, Any] = NOTHING) -> Aliases:
        """Return the index of a model's parameters and buffers, and of the tensors in `more`.

        A parameter that modules share has its first name; a tensor of `more` has the name
        `state()/KEY`.
        """
        tensors: dict[str, Tensor] = {
            f"state()/{name}": each for name, each in more.items() if isinstance(each, Tensor)
        }
        tensors |= chain(model.named_parameters(), model.named_buffers())
        return cls.of_tensors(tensors)

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> Aliases:
        """Return the index of tensors that are given by the name under which each is saved."""
        memory = {
            key: name for name, each in tensors.items() if (key := memory_of(each)) is not None
        }
        return cls({id(each): name for name, each in tensors.items()}, memory, tensors)

    def is_alias(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is an indexed tensor, or shares memory with one."""
        return id(tensor) in self.names or memory_of(tensor) in self.memory


def memory_of(tensor: Tensor) -> Any:
    """Return the device and address of a tensor's storage, which are the same for all its views.

    Returns None if the storage has no known address, as for a sparse tensor.
    """
    try:
        place = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    except (RuntimeError, NotImplementedError):
        return None
    return (tensor.device, place) if place else None


def sign(value: Any, aliases: Aliases) -> Any:
    """Return a value that differs, by `==`, once `value` has changed.

    For a tensor it contains the dtype, the shape and a digest of the bytes. It is None for an
    object that cannot be saved and holds neither tensors nor the state of a random generator.
    """
    return _sign(value, aliases) if is_state(value) else _sign_opaque(value, aliases)


def _sign(value: Any, aliases: Aliases) -> Any:
    parts = parts_of(value)
    if parts is not None:
        return type(value).__name__, tuple((repr(key), _sign(part, aliases)) for key, part in parts)
    if isinstance(value, Tensor):
        return _sign_tensor(value, aliases)
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    return type(value).__name__, repr(value)


def _sign_tensor(tensor: Tensor, aliases: Aliases) -> Any:
    if id(tensor) in aliases.names:
        return "same", aliases.names[id(tensor)]
    if (name := aliases.memory.get(memory_of(tensor))) is not None:
        return "view", name, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    try:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return (
            "tensor",
            str(tensor.dtype),
            tuple(tensor.shape),
            hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest(),
        )
    except (RuntimeError, NotImplementedError, TypeError):  # sparse, nested, on the meta device
        return (
            "tensor",
            str(tensor.dtype),
            id(tensor),
            None if tensor.is_inference() else tensor._version,
        )


def _sign_opaque(value: Any, aliases: Aliases) -> Any:
    """Return the state of a random generator, or digests of the tensors in an object's attributes.

    Returns None for an object without tensors.
    """
    if is_generator(value):
        return sign_generator(value)
    if isinstance(value, nn.Module | type) or callable(value):
        return None
    held = {
        name: each
        for name, each in getattr(value, "__dict__", {}).items()
        if isinstance(each, Tensor)
    }
    return {name: _sign_tensor(each, aliases) for name, each in held.items()} or None


def map_leaves(value: Any, change: Callable[[str, Any], Any], path: str) -> Any:
    """Return `value` with every value inside that is not a container replaced by a new one.

    The new value is `change(path, old value)`. For an entry of a container, the path is that of the
    container, a slash and the key of the entry.
    """
    parts = parts_of(value)
    if parts is None:
        return change(path, value)
    return rebuild(value, [(key, map_leaves(part, change, f"{path}/{key}")) for key, part in parts])


def find_owner(model: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """Return the module that has the attribute with a dotted name, and the last part of the name.

    The module is None if the model does not have it.
    """
    above, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(above), leaf
    except AttributeError:
        return None, leaf


def is_same(now: Any, before: Any) -> bool:
    """Return whether two plain values have the same type and `repr`; NaN is the same as NaN."""
    return type(now) is type(before) and repr(now) == repr(before)


def named_attributes(model: nn.Module) -> Mapping[str, Any]:
    """Return the plain attributes of all modules by dotted name."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        for name, value in attributes_of(module).items()
    }


def read_forms(model: nn.Module) -> dict[str, Any]:
    """Return the dtype and shape of every buffer by dotted name; None for a buffer that is None."""
    return {
        f"{prefix}.{name}" if prefix else name: None
        if buffer is None
        else (buffer.dtype, tuple(buffer.shape))
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
    }
