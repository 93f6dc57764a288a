"""The module that is running: in the forward pass by hooks, in the backward pass by the autograd
nodes that it created.

Each node belongs to the innermost module that was running when the node was created, so that
modules which share an input, or return it unchanged, can be distinguished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

from surefoot.runtime.nested_tensors import find_tensors

ROOT = "."  # the model itself


class ModuleFollower:
    """A context that follows the modules of `model`; `now` is the name of the innermost running
    one, None between modules."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name or ROOT for name, module in model.named_modules()}
        self._running: list[tuple[str, set[Any]]] = []  # with the autograd nodes of its inputs
        self._behind: str | None = None
        self._owned: set[Any] = set()  # nodes, kept alive: the id of a freed node is reused
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for module, name in self._names.items():
            self._handles.append(
                module.register_forward_pre_hook(self._enter_of(name), with_kwargs=True)
            )
            self._handles.append(module.register_forward_hook(self._exit_module, always_call=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._owned.clear()

    @property
    def now(self) -> str | None:
        return self._running[-1][0] if self._running else self._behind

    def module_stack(self) -> list[str]:
        """Return the running module and all modules that contain it, the model itself first."""
        name = self.now
        if name is None or name == ROOT:
            return [] if name is None else [ROOT]
        parts = name.split(".")
        return [ROOT, *(".".join(parts[:end]) for end in range(1, len(parts) + 1))]

    def _enter_of(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append((name, set(_nodes((args, kwargs)))))

        return enter

    def _exit_module(self, module: nn.Module, args: Any, out: Any) -> None:
        """End a module's forward pass, and give it the autograd nodes between its inputs and
        outputs that no module has."""
        name, seen = self._running.pop()
        waiting = list(_nodes(out))
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            if node not in self._owned:
                self._owned.add(node)
                self._handles += [
                    node.register_prehook(self._begin_of(name)),
                    node.register_hook(self._end),
                ]

    def _begin_of(self, name: str) -> Callable[[Any], None]:
        def begin(gradients: Any) -> None:
            self._behind = name

        return begin

    def _end(self, inputs: Any, outputs: Any) -> None:
        self._behind = None


def _nodes(tree: Any) -> Iterator[Any]:
    """Return the autograd node of each tensor in `tree`."""
    return (each.grad_fn for each in find_tensors(tree) if each.grad_fn is not None)
