"""Forward passes in training mode before the run, without dropout and without effects on state."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from surefoot.components import checkpoint
from surefoot.components.stability.norms import find_batch_norms
from surefoot.runtime.attributes.rewritten import watch_weights
from surefoot.train.assemble import Assembly
from surefoot.train.quiet import preserve_state

DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.feature_dropout,
)
PLACE_OF_DROPOUT = 4  # among the arguments of scaled_dot_product_attention
PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))
CONTAINERS = (list, dict, set, deque)
MAX_SIZE = 1 << 20  # elements of a tensor or container outside of the model that is copied


def can_try(assembly: Assembly) -> bool:
    """Return whether a trial in training mode can be undone: no forward pass may step an optimizer.

    The model and the task are searched for optimizers in attributes.
    """
    spaces = [vars(module) for module in assembly.model.modules()]
    spaces.append(getattr(assembly.task.task, "__dict__", {}))
    return not any(isinstance(value, Optimizer) for space in spaces for value in space.values())


@contextmanager
def trial_in_training_mode(assembly: Assembly) -> Iterator[None]:
    """Set the modes of training inside the context, and restore all state at its end.

    Dropout is off, and BatchNorm is in evaluation mode: both are known to depend on the batch. The
    attributes of the task and the variables of its file are restored too, as far as they are
    numbers, text, containers, tensors, random generators or modules.
    """
    model, task = assembly.model, assembly.task.task
    with ExitStack() as opened:
        values = _Values([getattr(task, "__dict__", {}), _variables_of(task)], model)
        opened.callback(values.put_back)
        for module in values.modules:
            opened.enter_context(watch_weights(module))
            opened.enter_context(preserve_state(module, evaluates=False))
        opened.enter_context(preserve_state(model, assembly.task.state, evaluates=False))
        for module in find_batch_norms(model).values():
            module.eval()
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0
        opened.enter_context(_WithoutDropout())
        yield


def _variables_of(task: Any) -> dict[str, Any]:
    """Return the variables of the file that defines the forward pass; none of those of surefoot."""
    forward = getattr(type(task), "forward", None)
    found: dict[str, Any] = getattr(forward, "__globals__", {})
    return {} if str(found.get("__name__")).startswith("surefoot.") else found


class _Values:
    """Values of attributes and variables outside of the model, from which they are restored."""

    def __init__(self, spaces: Sequence[dict[str, Any]], model: nn.Module) -> None:
        known = {id(each) for each in model.modules()}
        self.modules: list[nn.Module] = []
        self._plain: list[tuple[dict[str, Any], str, Any]] = []
        self._restore: list[Callable[[], Any]] = []
        for space in spaces:
            for name, value in list(space.items()):
                if name.startswith("__"):
                    continue
                if isinstance(value, nn.Module):
                    if id(value) not in known:
                        self.modules.append(value)
                elif isinstance(value, (*PLAIN, *CONTAINERS, Tensor)):
                    self._plain.append((space, name, value))
                self._copy(value)

    def _copy(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.numel() <= MAX_SIZE and value.is_leaf:
                kept = value.detach().clone()
                self._restore.append(lambda: value.detach().copy_(kept))
        elif type(value) in CONTAINERS and len(value) <= MAX_SIZE:
            held = copy.copy(value)
            self._restore.append(lambda: _fill(value, held))
        elif checkpoint.is_generator(value):
            state = checkpoint.generator_state(value)
            self._restore.append(lambda: checkpoint.restore_generator(value, state))

    def put_back(self) -> None:
        for space, name, value in self._plain:
            if space.get(name) is not value:
                space[name] = value
        for restore in self._restore:
            restore()


def _fill(value: Any, held: Any) -> None:
    """Give a container the entries of `held`, if it has others."""
    if isinstance(value, dict):
        is_same = list(map(id, value.values())) == list(map(id, held.values()))
    else:
        is_same = list(map(id, value)) == list(map(id, held))
    if not is_same:
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(held)


class _WithoutDropout(TorchFunctionMode):
    """Forward passes whose dropout returns its input, in modules and in functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0] if args else given["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > PLACE_OF_DROPOUT:
                args = (*args[:PLACE_OF_DROPOUT], 0.0, *args[PLACE_OF_DROPOUT + 1 :])
            else:
                given["dropout_p"] = 0.0
        if func is F.multi_head_attention_forward:
            given["training"] = False
        return func(*args, **given)
