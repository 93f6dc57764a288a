"""Tasks of the campaigns with ranks that break surefoot in each rank which reads them.

The campaigns must see it.
"""

from __future__ import annotations

import ctypes
import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.prove.campaigns.probe import Probe
from surefoot.train.resume.keeper import CheckpointManager

SLOW_S = 0.5


class NoGuard(Probe):
    """Every number is taken for one."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        torch.isfinite = lambda tensor: torch.ones_like(tensor, dtype=torch.bool)
        math.isfinite = lambda number: True


class MovedOnResume(Probe):
    """A run that goes on has moved one weight a little."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        resume = CheckpointManager.resume

        def resume_and_move(self: CheckpointManager) -> Any:
            found = resume(self)
            if found[0] is not None:
                with torch.no_grad():
                    next(self._assembly.model.parameters()).mul_(1 + 1e-6)
            return found

        CheckpointManager.resume = resume_and_move


class Outlives(Probe):
    """A rank that does not die with its supervisor, and is slow."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(SLOW_S)
        return super().forward(model, batch)
