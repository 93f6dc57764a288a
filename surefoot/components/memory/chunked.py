"""Linear layer with cross-entropy, computed in chunks of rows to save memory.

The logits of all rows never exist at the same time. The gradients are computed together with the
loss, while the logits of a chunk exist, as in Liger (Hsu et al. 2024, arXiv 2410.10989) and Cut
Cross-Entropy (Wijmans et al. 2024, arXiv 2411.09009). Each row takes three matmuls, as many as
without chunks.
"""

# R rows (all leading sizes as one), D width, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surefoot.core.errors import InputError

CHUNK_ELEMENTS = 1 << 22  # logits at a time: 16 MiB in fp32
FEWEST_ROWS = 64  # with fewer rows the matmul becomes inefficient


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of `linear(hidden, weight, bias)`, computed in chunks.

    The logits of all rows never exist at the same time. The sum and its gradients are those of
    `cross_entropy(linear(hidden, weight, bias).float(), targets, reduction="sum")`; under autocast,
    the matmuls run in the dtype of autocast. The result has no second derivatives.

    Args:
        hidden: Inputs of the output layer, (..., D).
        weight: Weight of the output layer, (V, D).
        targets: Class indices, (...), int64.
        bias: Bias of the output layer, (V,), or None.
        chunk: Number of rows whose logits exist at the same time; None for as many rows as have 16
            MiB of fp32 logits, but at least 64.
        ignore_index: Targets of this value are left out.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.

    Returns:
        The sum in nats, and the number of targets that it includes.

    Raises:
        InputError: For shapes that do not fit, targets that are not integers, and a chunk or
            smoothing out of range.

    >>> hidden, weight = torch.ones(2, 3, 4), torch.zeros(5, 4)
    >>> targets = torch.tensor([[0, 1, 2], [3, 4, -100]])
    >>> total, count = linear_cross_entropy(hidden, weight, targets)
    >>> round(total.item(), 3), count.item()
    (8.047, 5)
    """
    _check(hidden, weight, targets, bias, chunk, label_smoothing)
    hidden_RD, targets_R = hidden.reshape(-1, weight.shape[1]), targets.reshape(-1)
    settings = (
        chunk or max(FEWEST_ROWS, CHUNK_ELEMENTS // len(weight)),
        ignore_index,
        label_smoothing,
    )
    total: Tensor
    if torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (hidden, weight, bias)
    ):
        apply: Any = _Chunked.apply
        total = apply(hidden_RD, weight, bias, targets_R, settings)
    else:
        total = _compute(hidden_RD, weight, bias, targets_R, settings, needs=(False, False, False))[
            0
        ]
    return total, (targets_R != ignore_index).sum()


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    chunk: int | None,
    label_smoothing: float,
) -> None:
    if (
        weight.ndim != 2
        or not hidden.ndim
        or hidden.shape[-1] != weight.shape[1]
        or hidden.shape[:-1] != targets.shape
    ):
        raise InputError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets "
            f"{tuple(targets.shape)} do not fit",
            hint="hidden is (..., D), weight (V, D), targets (...)",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(
            f"the bias is {tuple(bias.shape)}, the weight has {len(weight)} rows",
            hint="pass a bias of shape (V,), one value per row of the weight",
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise InputError(
            f"the targets are {targets.dtype}",
            hint="give the numbers of the right words: torch.int64",
        )
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk is {chunk}", hint="give a number of rows, 1 or more, or None")
    if not 0 <= label_smoothing < 1:
        raise InputError(
            f"label_smoothing is {label_smoothing}", hint="use 0 or more, and less than 1"
        )


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        settings: tuple[int, int, float],
    ) -> Tensor:
        total, gradients = _compute(
            hidden_RD, weight_VD, bias_V, targets_R, settings, needs=ctx.needs_input_grad[:3]
        )
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError(
                "linear_cross_entropy can be differentiated once, and create_graph asks for more",
                hint=(
                    "use cross_entropy(linear(hidden, weight), targets) "
                    "where a second derivative is needed"
                ),
            )
        # in the dtype of the loss: in 16 bits, the rounding of 1 / count would scale all gradients
        made = (
            None if each is None else (each.to(gradient.dtype) * gradient).to(each.dtype)
            for each in ctx.saved_tensors
        )
        return *made, None, None


def _compute(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_R: Tensor,
    settings: tuple[int, int, float],
    *,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return the summed loss, and the gradients of hidden, weight and bias that `needs` selects."""
    rows, ignored, smoothing = settings
    device = hidden_RD.device.type
    dtype = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_RD.dtype
    )
    exact = torch.promote_types(dtype, torch.float32)
    needs_hidden, needs_weight, needs_bias = needs
    weight = weight_VD.to(dtype)
    bias = None if bias_V is None else bias_V.to(dtype)
    total = torch.zeros((), dtype=exact, device=hidden_RD.device)
    hidden_grad = torch.empty_like(hidden_RD) if needs_hidden else None
    weight_grad = torch.zeros_like(weight_VD, dtype=exact) if needs_weight else None
    bias_grad = torch.zeros_like(bias_V, dtype=exact) if needs_bias and bias_V is not None else None
    for start in range(0, len(hidden_RD), rows):
        part = slice(start, start + rows)
        hidden, targets = hidden_RD[part].to(dtype), targets_R[part]
        counted = targets != ignored
        places = targets.masked_fill(~counted, 0)[:, None]
        logs = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias).to(exact), -1)
        nats = logs.gather(1, places)[:, 0].mul_(smoothing - 1)
        if smoothing:
            nats.sub_(logs.mean(-1), alpha=smoothing)
        total += nats.masked_fill_(~counted, 0.0).sum()
        if not any(needs):
            continue
        # the gradient of the logits: probabilities minus the one-hot targets
        wrong = logs.exp_()
        if smoothing:
            wrong.sub_(smoothing / wrong.shape[1])
        wrong.scatter_add_(1, places, torch.full_like(nats, smoothing - 1)[:, None])
        wrong.mul_(counted[:, None])
        if bias_grad is not None:
            bias_grad += wrong.sum(0)
        low = wrong.to(dtype)
        if hidden_grad is not None:
            hidden_grad[part] = low @ weight
        if weight_grad is not None and exact == dtype:
            weight_grad.addmm_(low.T, hidden)
        elif weight_grad is not None:
            weight_grad += low.T @ hidden
    return total, (
        hidden_grad,
        None if weight_grad is None else weight_grad.to(weight_VD.dtype),
        None if bias_grad is None or bias_V is None else bias_grad.to(bias_V.dtype),
    )
