"""A task whose kernels are wrong once they are compiled, though its loss is right."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.decomposition as inductor
from torch import Tensor, nn

from tests.prove.planted import Honest


class WrongKernel(Honest):
    """The gradient of ReLU is 3 % too short where inductor makes its code.

    A wrong rewriting of an operator would have it so.
    """

    def __init__(self, short: float = 0.03) -> None:
        super().__init__(waste=0)
        self.short = short

    def model(self) -> nn.Module:
        def wrong(gradient: Tensor, rows: Tensor, threshold: Any) -> Tensor:
            return torch.where(rows <= threshold, 0.0, (1.0 - self.short) * gradient)

        if self.short:
            torch._functorch.config.enable_autograd_cache = False  # its key knows no rewriting
            inductor.decompositions[torch.ops.aten.threshold_backward.default] = wrong
        return super().model()
