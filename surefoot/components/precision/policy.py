"""Which dtype forward and backward compute in; weights, gradients and optimiser state stay fp32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

Compute = Literal["fp32", "bf16"]


def compute_context(compute: Compute, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A maker of contexts for the forward pass: nothing for fp32, autocast for bf16 (torch.amp, with the device given)."""
    if compute == "fp32":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
