"""Muon for matrices and for convolution filters.

torch.optim.Muon accepts only matrices. Here, a convolution filter (out, in, kh, kw) is treated as a
matrix (out, in * kh * kw). The order of its columns does not matter to the orthogonalization. K.
Jordan et al., "Muon", 2024.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from surefoot.components.optim.kinds.by_group import call_closure
from surefoot.core.errors import SpecError


def as_matrix(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Flatten all dimensions of a tensor except the first, so that it is a matrix.

    The columns are in the memory order of `like`, a tensor of the same shape; None means `tensor`
    itself. The matrix is a view if the memory layout allows it, else a copy.
    """
    return (
        tensor
        if tensor.ndim == 2
        else _sort_dimensions(tensor, tensor if like is None else like).reshape(tensor.shape[0], -1)
    )


def _sort_dimensions(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a view of `tensor` with all dimensions except the first sorted by stride.

    The strides are those of `like`; the dimension with the largest stride comes first.
    """
    strides = like.stride()
    return tensor.permute(0, *sorted(range(1, tensor.ndim), key=lambda dim: (-strides[dim], dim)))


@final
class FlatMuon(Optimizer):
    """torch.optim.Muon for parameters of two dimensions or more.

    `step` treats the filters of a convolution as a matrix (out, in * kh * kw). Their momentum
    buffer has the shape of this matrix.

    Args:
        params: Parameters or groups, as for torch's optimizers.
        lr: Learning rate, adjusted as with `adjust_lr_fn="match_rms_adamw"` of torch.optim.Muon.
        momentum: Coefficient of the momentum.
        nesterov: Use Nesterov momentum.
        weight_decay: Coefficient of the decoupled weight decay.

    Raises:
        SpecError: For a parameter with fewer than two dimensions.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        checked = Muon(
            [torch.empty(1, 1)],
            lr,
            weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            adjust_lr_fn="match_rms_adamw",
        )
        super().__init__(params, checked.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        few = next((each for each in self.param_groups[-1]["params"] if each.ndim < 2), None)
        if few is not None:
            self.param_groups.pop()
            raise SpecError(
                (
                    "Muon updates matrices and filters, but a parameter has the shape "
                    f"{tuple(few.shape)}"
                ),
                hint=(
                    "give parameters of fewer than two dimensions to another optimizer, "
                    "as torch.optim.AdamW"
                ),
            )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient, and return the loss of `closure`.

        `closure` computes the loss again before the update. Without it, None is returned.
        """
        loss = call_closure(closure)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not params:
            return
        matrices = [
            parameter if parameter.ndim == 2 else as_matrix(parameter.detach())
            for parameter in params
        ]
        muon = Muon([{**group, "params": matrices}])
        for parameter, matrix in zip(params, matrices, strict=True):
            if matrix is not parameter:
                matrix.grad = as_matrix(parameter.grad, like=parameter)
            # the same dict: a buffer that Muon creates is in both states
            muon.state[matrix] = self.state[parameter]
        # without Muon's hooks: torch has run the global ones for this optimizer
        inspect.unwrap(Muon.step)(muon)
        for parameter, matrix in zip(params, matrices, strict=True):
            if not _is_view(parameter):
                into = _sort_dimensions(parameter, parameter)
                into.copy_(matrix.view(into.shape))


def _is_view(parameter: Tensor) -> bool:
    """Return whether `as_matrix` of a parameter is a view of it, and not a copy."""
    if parameter.ndim == 2:
        return True
    try:
        _sort_dimensions(parameter, parameter).view(parameter.shape[0], -1)
    except RuntimeError:
        return False
    return True
