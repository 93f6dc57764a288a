"""Parameters that the code of a model writes itself, in a forward pass, a hook or `train()`.

Examples are `F.embedding(..., max_norm=...)`, prototypes that `forward` normalizes, and weights
that a pre-hook clamps. A watched forward pass finds them by their operators: each operator that
writes to the memory of a parameter is seen, with or without `.data` and `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# functions that give the memory of a tensor to code that writes without an operator
HANDLES = {
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.storage,
    Tensor.untyped_storage,
}
_FOUND: WeakKeyDictionary[nn.Module, dict[str, None]] = WeakKeyDictionary()


def find_renormed(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings with `max_norm`, by name.

    Their forward pass renormalizes the rows that it looks up.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    }


def find_rewritten(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a watched forward pass of `model` wrote, by name.

    The embeddings with `max_norm` are included without a watched forward pass.
    """
    names = {f"{name}.weight".lstrip("."): None for name in find_renormed(model)}
    names |= _FOUND.get(model, {})
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
    names = {each: name for name, each in model.named_parameters()}
    watch = WriteWatch(names)
    try:
        with watch:
            yield
    finally:
        if written := watch.put_back():
            _FOUND.setdefault(model, {}).update(dict.fromkeys(names[each] for each in written))


class WeightSnapshot:
    """Copies of parameters, and the memory that holds each of them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._held = [(each, each.data, each.detach().clone()) for each in parameters]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the values in the same memory, from which an optimizer may read them."""
        for parameter, memory, values in self._held:
            if _place(parameter) != _place(memory):
                parameter.data = memory
            parameter.copy_(values)


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode inside which nothing is compiled."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # else torch imports its compiler, and wraps each call, to switch off compilation
        return False


class WriteWatch(OperatorMode):
    """Context that copies parameters before operators write to them.

    `parameter.data = ...` calls no operator: the watch refers to the old memory, which keeps its
    values. A watch can be entered again, and keeps the copies that it has.

    Args:
        parameters: The parameters.
    """

    supports_higher_order_operators = True

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._memory = {each: each.data for each in parameters}
        self._stored: dict[int, list[nn.Parameter]] = {}
        for each in self._memory:
            for storage in _storages(each):
                self._stored.setdefault(storage, []).append(each)
        self._values: dict[nn.Parameter, Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        for tensor in _find_written(func, args, given):
            for storage in _storages(tensor):
                for each in self._stored.get(storage, ()):
                    if each not in self._values:
                        self._values[each] = self._memory[each].clone()
        return func(*args, **given)

    @torch.no_grad()
    def put_back(self) -> list[nn.Parameter]:
        """Restore the parameters that were written or have other memory; return them."""
        changed = [
            each
            for each, memory in self._memory.items()
            if each in self._values or _place(each) != _place(memory)
        ]
        for each in changed:
            each.data = self._memory[each]
            each.copy_(self._values.get(each, self._memory[each]))
        return changed


class HandleWatch(TorchFunctionMode):
    """Context in which a tensor counts as written once code outside of torch gets its memory.

    NumPy, and kernels that are given an address, write without an operator. A write through memory
    that such code got before the context is not seen.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if (
            func in HANDLES
            and type(args[0]) in (Tensor, nn.Parameter)
            and not (args[0].is_sparse or args[0].is_inference())
        ):
            # writes no element; all watches see the operator
            args[0].data.as_strided((0,), (1,)).zero_()
        return func(*args, **(kwargs or {}))


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


def _storages(tensor: Tensor) -> tuple[int, ...]:
    """Return the addresses of the storage objects that hold the elements of a tensor.

    A wrapper, such as a sharded or quantized tensor, has those of the tensors in it.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        tensors = (each for each in inner if isinstance(each, Tensor))
        return tuple(chain.from_iterable(map(_storages, tensors)))
    if tensor.is_sparse:
        return _storages(tensor._values())
    try:
        return (int(tensor.untyped_storage()._cdata),)
    except (NotImplementedError, RuntimeError):
        return (id(tensor),)


def _place(tensor: Tensor) -> Any:
    """Return a value that is the same for tensors with the same elements of the same storage."""
    layout = (tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else None
    return _storages(tensor), tensor.shape, layout
