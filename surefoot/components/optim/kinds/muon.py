"""Muon for every hidden matrix, convolution filters included: torch's own, over flattened views.

torch.optim.Muon refuses what is not a matrix. A convolution filter (out, in, kh, kw) is a matrix (out, in * kh * kw) of the
same storage; the order of its columns does not matter to the orthogonalisation. K. Jordan et al., "Muon", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon

from surefoot.core.errors import SpecError


def as_matrix(tensor: Tensor) -> Tensor:
    """A matrix view of the same storage, (size of the first dimension, all the rest); raises SpecError when there is none."""
    if tensor.ndim == 2:
        return tensor
    strides = tensor.stride()
    order = sorted(range(1, tensor.ndim), key=lambda dim: (-strides[dim], dim))
    try:
        return tensor.permute(0, *order).view(tensor.shape[0], -1)
    except RuntimeError:
        shape = " x ".join(map(str, tensor.shape))
        raise SpecError(
            f"a parameter of {shape} lies in memory with gaps, and Muon takes a filter as a matrix of the same memory",
            hint="make it contiguous in model(): nn.Parameter(x.contiguous())",
        ) from None


class FlatMuon(Muon):
    """torch.optim.Muon whose matrices may be views of filters; `lend_gradients` hands it the gradients before each step."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, lr: float, momentum: float, nesterov: bool) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        flat = [{**group, "params": [self._flatten(parameter) for parameter in group["params"]]} for group in groups]
        super().__init__(flat, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")

    def _flatten(self, parameter: Tensor) -> Tensor:
        if parameter.ndim == 2:
            return parameter
        matrix = as_matrix(parameter.detach())
        self._pairs.append((parameter, matrix))
        return matrix

    def originals(self) -> list[Tensor]:
        """The parameters that hold the gradients, in the order of the groups."""
        owner = {id(matrix): parameter for parameter, matrix in self._pairs}
        return [owner.get(id(p), p) for group in self.param_groups for p in group["params"]]

    def lend_gradients(self) -> None:
        """Give each matrix the gradient of its filter as a view of the same shape."""
        for parameter, matrix in self._pairs:
            if parameter.grad is None:
                matrix.grad = None
                continue
            same = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
            matrix.grad = as_matrix(
                same.copy_(parameter.grad) if parameter.grad.stride() != parameter.stride() else parameter.grad
            )
