"""A task whose reading and computing take as long as they are told, without a processor.

So other work beside it changes little.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.contract.task import Guarantee, Loss


class Waiting:
    """Reads a batch in `read_s`."""

    guarantee: Guarantee = "proven"
    digest = "waiting"
    thread_safe = True

    def __init__(self, read_s: float) -> None:
        self.read_s = read_s

    def __len__(self) -> int:
        return 4096

    def read(self, ids: np.ndarray) -> Tensor:
        time.sleep(self.read_s)
        return torch.from_numpy(ids[:, None] / 4096).float()

    def describe(self) -> str:
        return "waiting"


class Slow:
    """Reads for `read_s` a step, computes for `compute_s`."""

    def __init__(self, read_s: float = 0.03, compute_s: float = 0.02) -> None:
        self.read_s, self.compute_s = read_s, compute_s

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, split: str) -> Waiting:
        return Waiting(self.read_s)

    def forward(self, model: Any, batch: Tensor) -> Tensor:
        time.sleep(self.compute_s)
        made: Tensor = model(batch)
        return made

    def loss(self, output: Tensor, batch: Tensor) -> Loss:
        return Loss.sum(output.square().sum(), len(batch))
