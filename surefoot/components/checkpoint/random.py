"""Every random state of the process that a model or its data may draw from: torch, its devices, numpy, Python."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": np.random.get_state(), "python": random.getstate()}  # noqa: NPY002


def restore_random(saved: Mapping[str, Any]) -> None:
    """Put them back; those of devices that are not here are left out."""
    torch.set_rng_state(saved["torch"])
    for index, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
    np.random.set_state(saved["numpy"])  # noqa: NPY002
    random.setstate(saved["python"])
