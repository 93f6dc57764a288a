"""Tracking of the module that is running, in the forward pass and in the backward pass.

In the forward pass, module hooks report the module. In the backward pass, hooks of the autograd
nodes report it: each node belongs to the innermost module that was running when the node was
created. Modules can therefore be distinguished even if they share an input or return it unchanged.
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
    """A context that tracks which module of `model` is running.

    `now` is the name of the innermost running module, or None if no module is running.
    """

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
        """Return the names of the running module and of all modules around it, the outermost first.

        The model itself has the name ".". The list is empty if no module is running.
        """
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
        """End the forward pass of a module, and assign its autograd nodes to it.

        These are the nodes between the inputs and the outputs of the module, except for nodes that
        belong to a different module already.
        """
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
    """Return an iterator over the autograd nodes (`grad_fn`) of the tensors in `tree`."""
    return (each.grad_fn for each in find_tensors(tree) if each.grad_fn is not None)
