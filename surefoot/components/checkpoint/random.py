"""Reading and restoring of the global random states of torch, CUDA, NumPy and Python."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from surefoot.core.process.forked import uses_gpu


def cuda_states() -> list[torch.Tensor]:
    """Return the random state of each GPU; empty if this process has not initialized CUDA.

    Reading a state would initialize CUDA.
    """
    return torch.cuda.get_rng_state_all() if uses_gpu() else []


def random_states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda_states(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "python": random.getstate(),
    }


def restore_random(saved: Mapping[str, Any]) -> None:
    """Restore the random states that `random_states` returned.

    States of GPUs that this machine does not have are ignored.
    """
    torch.set_rng_state(saved["torch"])
    for index, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
    np.random.set_state(saved["numpy"])  # noqa: NPY002
    random.setstate(saved["python"])
