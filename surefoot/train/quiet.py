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


@contextmanager
def untouched(model: nn.Module, state: Callable[[], Mapping[str, Any]] | None = None) -> Iterator[None]:
    """Evaluation mode and no gradients inside; afterwards model, buffers, the task's `state()` and random streams are as before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    cpu_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's stream
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    held = [(value, _copy_of(value)) for value in (state() if state is not None else {}).values()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        for value, before in held:
            _restore(value, before)
        torch.set_rng_state(cpu_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for index, cuda_state in enumerate(cuda_states):
            torch.cuda.set_rng_state(cuda_state, index)


def can_be_kept(value: object) -> bool:
    """Whether a part of a task's `state()` can be put back in place: a tensor, an array, or an object with a state dict."""
    return isinstance(value, Tensor | np.ndarray) or all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _copy_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else copy.deepcopy(value.state_dict())


def _restore(value: Any, before: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(before)
    elif isinstance(value, np.ndarray):
        value[...] = before
    else:
        value.load_state_dict(before)
