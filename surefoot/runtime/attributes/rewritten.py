"""Parameters that the code of a model writes itself, in a forward pass, a hook or `train()`.

Examples are `F.embedding(..., max_norm=...)`, prototypes that `forward` normalizes, and weights
that a pre-hook clamps. A watched forward pass finds them by their operators: each operator that
writes to the memory of a parameter is seen, with or without `.data` and `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_FOUND: WeakKeyDictionary[nn.Module, dict[str, None]] = WeakKeyDictionary()


def find_rewritten(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a watched forward pass of `model` wrote, by name.

    The embeddings with `max_norm` are included without a watched forward pass.
    """
    names = {
        f"{name}.weight".lstrip("."): None
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    } | _FOUND.get(model, {})
    if not names:
        return {}
    held = dict(model.named_parameters(remove_duplicate=False))
    return {name: held[name] for name in names if name in held}


@contextmanager
def watch_weights(model: nn.Module) -> Iterator[None]:
    """Find the parameters that are written inside the context; restore them at its end.

    A parameter is copied before the first write to it, so a model whose weights stay as they are
    costs no memory.
    """
    watch = _WriteWatch(model)
    try:
        with watch:
            yield
    finally:
        if names := watch.put_back():
            _FOUND.setdefault(model, {}).update(dict.fromkeys(names))


class WeightSnapshot:
    """Copies of parameters, and the memory that holds each of them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._held = [(each, each.data, each.detach().clone()) for each in parameters]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the values in the same memory, from which an optimizer may read them."""
        for parameter, memory, values in self._held:
            if _key(parameter) != _key(memory):
                parameter.data = memory
            parameter.copy_(values)


class _WriteWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record of the writes to the parameters of a model.

    Args:
        model: The model.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = list(model.named_parameters())
        # `parameter.data = ...` calls no operator, but the parameter then has other memory
        self._memory = [(name, each, each.data) for name, each in named]
        self._names: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, each in named:
            self._names.setdefault(_key(each), []).append((name, each))
        self._kept: dict[str, WeightSnapshot] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # else torch imports its compiler to skip this mode; nothing compiles inside it
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        for tensor in _find_written(func, args, given):
            for name, parameter in self._names.get(_key(tensor), ()):
                if name not in self._kept:
                    self._kept[name] = WeightSnapshot([parameter])
        return func(*args, **given)

    def put_back(self) -> list[str]:
        """Restore the parameters that were written; return their names."""
        for kept in self._kept.values():
            kept.put_back()
        moved = [each for each in self._memory if _key(each[1]) != _key(each[2])]
        for _, parameter, memory in moved:
            parameter.data = memory
        return list(dict.fromkeys([*self._kept, *(name for name, _, _ in moved)]))


def _find_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to, by its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Tensor):
                yield each


def _key(tensor: Tensor) -> int:
    """Return the address of the storage object; that of the tensor if it has no single storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
