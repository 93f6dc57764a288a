"""Looking at a model without a trace: mode, buffers, a task's own state and every random stream are put back, whatever happens."""

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


@contextmanager
def untouched(
    model: nn.Module, state: Callable[[], Mapping[str, Any]] | None = None, *, evaluates: bool = True
) -> Iterator[None]:
    """No gradients inside, and evaluation mode, or with `evaluates` false the modes that the modules have.

    Afterwards the modes, buffers, weights that a forward pass changes (`max_norm`), the task's `state()` and random streams are as
    before. Raises TaskError for a `state()` that holds what cannot be put back in place.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    cpu_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's stream
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    held = [(value, _copy_of(name, value)) for name, value in (state() if state is not None else {}).items()]
    renormed = [(table.weight, table.weight.detach().clone()) for table in find_renormed(model).values()]
    if evaluates:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, kept in buffers:
                checkpoint.fill(name, buffer, kept)
                if getattr(module, name) is not buffer:  # a module may have put another tensor in its place
                    setattr(module, name, buffer)
            for weight, kept in renormed:
                weight.copy_(kept)
        for value, before in held:
            _restore(value, before)
        torch.set_rng_state(cpu_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for index, cuda_state in enumerate(cuda_states):
            torch.cuda.set_rng_state(cuda_state, index)


def read_streams() -> tuple[Any, ...]:
    """Return where the global random streams of torch, NumPy and Python are, to be compared with another time."""
    name, numbers, *place = np.random.get_state()  # noqa: NPY002 - the user's stream
    return torch.get_rng_state().numpy().tobytes(), name, np.asarray(numbers).tobytes(), place, random.getstate()


def _copy_of(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if all(callable(getattr(value, part, None)) for part in ("state_dict", "load_state_dict")):
        return copy.deepcopy(value.state_dict())
    raise TaskError(
        f"state() gives {name!r} as a {type(value).__name__}, which cannot be put back in place",
        hint="give a tensor or array that is changed in place, or an object with state_dict and load_state_dict",
    )


def _restore(value: Any, before: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(before)
    elif isinstance(value, np.ndarray):
        value[...] = before
    else:
        value.load_state_dict(before)
