"""Run a model without side effects on its state, the task's state and the random generators."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.components import checkpoint
from surefoot.components.parallel.renormed import find_renormed
from surefoot.core.errors import TaskError
from surefoot.core.units import name_some
from surefoot.runtime.attributes.generators import cuda_states
from surefoot.runtime.attributes.snapshot import AttributeSnapshot
from surefoot.runtime.attributes.values import Aliases, named_attributes, sign


@contextmanager
def preserve_state(
    model: nn.Module,
    state: Callable[[], Mapping[str, Any]] | None = None,
    *,
    evaluates: bool = True,
) -> Iterator[None]:
    """Disable gradients and set evaluation mode inside the context; restore all state at its end.

    With `evaluates` false, the modules keep their training or evaluation mode. The state comprises
    the modes, buffers and attributes of modules, the weights that a forward pass changes
    (`max_norm`), the entries of the task's `state()`, and the random generators. Raises TaskError
    if `state()` holds an object that cannot be restored in place.
    """
    modes = [(module, module.training) for module in model.modules()]
    registered = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = [
        (name, buffer, buffer.detach().clone())
        for _, held_there in registered
        for name, buffer in held_there.items()
        if buffer is not None
    ]
    attributes = AttributeSnapshot(model)
    cpu_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - the user's stream
    on_devices = cuda_states()
    held = [
        (name, value, _copy_of(name, value))
        for name, value in (state() if state is not None else {}).items()
    ]
    renormed = [
        (table.weight, table.weight.detach().clone()) for table in find_renormed(model).values()
    ]
    if evaluates:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for name, buffer, kept in buffers:
                checkpoint.fill(name, buffer, kept)
            for module, held_there in registered:
                # a module may have replaced a buffer, or None, by a different tensor
                module._buffers.clear()
                module._buffers.update(held_there)
            for weight, kept in renormed:
                weight.copy_(kept)
        attributes.put_back()
        for name, value, before in held:
            restore_entry(name, value, before)
        torch.set_rng_state(cpu_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for index, cuda_state in enumerate(on_devices):
            torch.cuda.set_rng_state(cuda_state, index)


def set_modes(model: nn.Module) -> list[str]:
    """Set training mode if the model itself is in evaluation mode; return notes.

    `from_pretrained` returns such a model. If the model is in training mode, submodules that
    `model()` set to evaluation mode stay so.
    """
    if not model.training:
        model.train()
        return ["model() returned the model in evaluation mode: it is trained in training mode"]
    kept = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if not module.training
    ]
    if not kept:
        return []
    return [f"{name_some(kept, 3)} stay in evaluation mode, as set by model()"]


def read_streams() -> tuple[Any, ...]:
    """Return the states of the global generators (torch, NumPy, Python), for a comparison."""
    name, numbers, *place = np.random.get_state()  # noqa: NPY002 - the user's stream
    states = torch.get_rng_state(), *cuda_states()
    of_torch = [each.numpy().tobytes() for each in states]
    return of_torch, name, np.asarray(numbers).tobytes(), place, random.getstate()


def _copy_of(name: str, value: Any) -> Any:
    found = read_entry(name, value)
    return found.detach().clone() if isinstance(found, Tensor) else copy.deepcopy(found)


def read_entry(name: str, value: Any) -> Any:
    """Return the value that a checkpoint stores for an entry of the task's `state()`.

    Tensors and arrays are not copied. Raises TaskError for an entry that cannot be restored in
    place.
    """
    if isinstance(value, Tensor | np.ndarray):
        return value
    if checkpoint.is_generator(value):
        return checkpoint.generator_state(value)
    if checkpoint.has_state(value):
        return value.state_dict()
    raise TaskError(
        f"state() gives {name!r} as {checkpoint.name_kind(value)}, "
        "which cannot be restored in place",
        hint=(
            "give a tensor or array that is changed in place, a random generator of torch, NumPy "
            "or Python, or an object with state_dict and load_state_dict"
        ),
    )


@torch.no_grad()
def restore_entry(name: str, value: Any, saved: Any) -> None:
    """Restore an entry of the task's `state()` in place from the return value of `read_entry`."""
    if isinstance(value, Tensor):
        checkpoint.fill(name, value, saved)
    elif isinstance(value, np.ndarray):
        value[...] = saved
    elif checkpoint.is_generator(value):
        checkpoint.restore_generator(value, saved)
    else:
        value.load_state_dict(saved)


NONE = Aliases({}, {}, {})


class CarriedState:
    """Comparison of buffers, module attributes and the task's `state()` between evaluated batches.

    A change that only the first of several batches makes does not count, because a model may build
    a table on first use.
    """

    def __init__(self, model: nn.Module, state: Callable[[], Mapping[str, Any]] | None) -> None:
        self._model, self._state = model, state
        self._num_batches, self._before = 0, self._sign()
        self._after_first: dict[str, Any] = {}

    def after_batch(self) -> None:
        """Count a batch; after the first one, read the state."""
        self._num_batches += 1
        if self._num_batches == 2:
            self._before = self._after_first
        if self._num_batches == 1:
            self._after_first = self._sign()

    def has_changed(self) -> bool:
        """Return whether state has changed since the first batch, or in the only batch."""
        return bool(self.find_changed())

    def find_changed(self) -> list[str]:
        """Return the names of state changed since the first batch, or in the only batch."""
        now, before = self._sign(), self._before
        return [name for name in {**before, **now} if now.get(name) != before.get(name)]

    def _sign(self) -> dict[str, Any]:
        state = {} if self._state is None else self._state()
        aliases = Aliases.of(self._model, state)
        found = {
            f"attributes/{name}": sign(value, aliases)
            for name, value in named_attributes(self._model).items()
        }
        found |= {
            f"buffers/{name}": sign(value, NONE) for name, value in self._model.named_buffers()
        }
        return found | {
            f"state/{name}": sign(read_entry(name, value), NONE) for name, value in state.items()
        }
