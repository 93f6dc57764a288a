"""Looking at a model without leaving a trace: mode, buffers and every random stream are put back, even after an exception."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; afterwards the model, its buffers and the random streams are as before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    cpu_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's stream
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
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
        torch.set_rng_state(cpu_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for index, state in enumerate(cuda_states):
            torch.cuda.set_rng_state(state, index)
