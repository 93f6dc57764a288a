"""A model that needs 537 MB.

33.6 million parameters, their gradients and two moments each, four bytes a number.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDE, NARROW, BATCH, STEPS = 4096, 2048, 32, 5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(NARROW, WIDE),
        nn.ReLU(),
        nn.Linear(WIDE, WIDE),
        nn.ReLU(),
        nn.Linear(WIDE, NARROW),
        nn.ReLU(),
        nn.Linear(NARROW, 10),
    )


def draw_samples() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(STEPS * BATCH, NARROW, generator=draws), torch.randint(
        0, 10, (STEPS * BATCH,), generator=draws
    )
