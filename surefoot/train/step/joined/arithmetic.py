"""Optimizer step as branch-free tensor arithmetic that a compiler can trace.

It contains the norm, the non-finite check, clipping, and the rules of Adam, AdamW, SGD, LARS and
LAMB. The formulas are those of torch's fused kernels (`components/optim/fused`) and of
`components/optim/kinds/layerwise`, so that results agree up to rounding. If the norm or a loss is
not finite, no parameter and no optimizer state changes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CLIP_EPS = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_
Tensors = list[Tensor]


@dataclass(frozen=True)
class UpdateRule:
    """Optimizer name and hyperparameters of a parameter group, without the learning rate."""

    name: str
    decay: float
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    trust_coefficient: float = 0.0
    adapt: bool = False

    @classmethod
    def of(cls, name: str, group: dict[str, Any]) -> UpdateRule:
        if name == "sgd":
            return cls(
                name, group["weight_decay"], momentum=group["momentum"], nesterov=group["nesterov"]
            )
        if name == "lars":
            return cls(
                name,
                group["weight_decay"],
                momentum=group["momentum"],
                trust_coefficient=group["trust_coefficient"],
                adapt=group["adapt"],
            )
        assert name in ("adam", "adamw", "lamb"), f"there is no update formula for {name!r}"
        return cls(
            name,
            group["weight_decay"],
            betas=tuple(group["betas"]),
            eps=group["eps"],
            adapt=group.get("adapt", False),
        )


def move(
    rules: Sequence[UpdateRule],
    held: Sequence[tuple[Tensors, ...]],
    grads: Sequence[Tensor | None],
    rates: Sequence[Tensor],
    losses: Sequence[Tensor],
    clip: float,
    clip_value: float | None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Apply one optimizer step in place to the parameters and optimizer state in `held`.

    If the gradient norm is not finite, nothing changes. A parameter without a gradient keeps its
    value and its state.

    Args:
        rules: The update rule of each parameter group.
        held: For each group: parameters, step counters, first moments, second moments, momentum.
        grads: The gradients of the parameters of all groups, in this order; None for a parameter
            without a gradient.
        rates: The learning rate of each group, a scalar tensor.
        losses: Losses, scalar tensors; a non-finite one makes the norm NaN.
        clip: Limit of the global gradient norm; 0 for no limit.
        clip_value: Limit of the absolute value of each element; None for no limit.

    Returns:
        The global gradient norm before clipping, whether this norm is finite, and the clipped
        gradients, which the fused kernels return too.
    """
    norms = [None if grad is None else torch.linalg.vector_norm(grad) for grad in grads]
    found = [each for each in norms if each is not None]
    if not found:
        return (
            torch.zeros_like(losses[0]),
            torch.zeros_like(losses[0], dtype=torch.bool),
            list(grads),
        )
    norm = torch.linalg.vector_norm(torch.stack(found))
    for loss in losses:
        norm = norm + 0.0 * loss
    finite = torch.isfinite(norm)
    factor = (
        _as_constants(torch.where(finite, (clip / (norm + CLIP_EPS)).clamp(max=1.0), 1.0))
        if clip
        else None
    )
    limited = [
        None if grad is None else _scale_and_clip(grad, factor, clip_value) for grad in grads
    ]
    if clip_value is not None:
        norms = [None if grad is None else torch.linalg.vector_norm(grad) for grad in limited]
    elif factor is not None:
        norms = [None if each is None else factor * each for each in norms]
    left = iter(zip(limited, norms, strict=True))
    for rule, tensors, rate in zip(rules, held, rates, strict=True):
        _move_group(rule, tensors, [next(left) for _ in tensors[0]], rate, finite)
    return norm, finite, limited


def _as_constants(scalars: Tensor) -> Tensor:
    """Return a view of `scalars` that the compiler computes once instead of once per element."""
    return torch.as_strided(scalars, scalars.shape, scalars.stride())


def _scale_and_clip(grad: Tensor, factor: Tensor | None, limit: float | None) -> Tensor:
    # the product may have the dtype of the factor
    grad = grad if factor is None else (grad * factor).to(grad.dtype)
    return grad if limit is None else grad.clamp(-limit, limit)


def _move_group(
    rule: UpdateRule,
    tensors: tuple[Tensors, ...],
    grads: Sequence[tuple[Tensor | None, Tensor | None]],
    rate: Tensor,
    finite: Tensor,
) -> None:
    """Apply one optimizer step to a parameter group.

    `tensors` holds what `move` describes for a group, `grads` each gradient with its norm.
    """
    params, counters, first, second, momentum = tensors
    wide = functools.reduce(torch.promote_types, (each.dtype for each in params), torch.float32)
    # one counter for all; if only some have gradients, FusedGroup.count_traced counts later
    if len(counters) < len(params):
        counts = [counters[0] + finite] if counters else []
        if counters and all(grad is not None for grad, _ in grads):
            counters[0].copy_(counts[0])
    else:
        for counter, (grad, _) in zip(counters, grads, strict=True):
            if grad is not None:
                counter.add_(finite)
        counts = counters
    corrections = _corrections(rule, torch.stack(counts).double(), wide) if counts else None
    for number, (param, (grad, size)) in enumerate(zip(params, grads, strict=True)):
        if grad is None or size is None:
            continue
        if corrections is None:
            _move_by_momentum(
                rule,
                param,
                grad,
                momentum[number] if momentum else None,
                _rate(rule, param, size, rate, wide),
                finite,
            )
        else:
            each = corrections[:, number if len(counts) > 1 else 0]
            _move_by_moments(rule, param, grad, (first[number], second[number]), each, rate, finite)


def _rate(rule: UpdateRule, param: Tensor, size: Tensor, rate: Tensor, wide: torch.dtype) -> Tensor:
    """Return the learning rate of a layer, which LARS scales by weight norm / gradient norm.

    `size` is the norm of the layer's gradient. The result has the dtype `wide`.
    """
    if rule.name == "lars" and rule.adapt:
        weights = torch.linalg.vector_norm(param)
        rate = rate * torch.where(
            (weights > 0) & (size > 0),
            rule.trust_coefficient * weights / (size + rule.decay * weights),
            1.0,
        )
    return _as_constants(rate.to(wide))


def _move_by_momentum(
    rule: UpdateRule, param: Tensor, grad: Tensor, kept: Tensor | None, rate: Tensor, finite: Tensor
) -> None:
    """Apply SGD or LARS to a parameter; `kept` is its momentum buffer.

    In LARS the momentum includes the learning rate of the layer.
    """
    grad = grad + rule.decay * param
    if rule.name == "lars":
        grad = rate * grad
    if rule.momentum and kept is not None:
        moved = rule.momentum * kept + grad
        grad = grad + rule.momentum * moved if rule.nesterov else moved
        _put(kept, moved, finite)
    _put(param, param - (grad if rule.name == "lars" else rate * grad), finite)


def _corrections(rule: UpdateRule, counts: Tensor, wide: torch.dtype) -> Tensor:
    """Return 1 - beta1^t and sqrt(1 - beta2^t) for each step count t, shape (2, len(counts))."""
    first, second = (1.0 - beta**counts for beta in rule.betas)
    return _as_constants(torch.stack((first, second.sqrt())).to(wide))


def _move_by_moments(
    rule: UpdateRule,
    param: Tensor,
    grad: Tensor,
    kept: tuple[Tensor, Tensor],
    corrections: Tensor,
    rate: Tensor,
    finite: Tensor,
) -> None:
    """Apply Adam, AdamW or LAMB to a parameter; `kept` holds its first and second moment."""
    (first, second), (of_mean, root) = kept, corrections.unbind()
    beta1, beta2 = rule.betas
    grad = grad + rule.decay * param if rule.name == "adam" and rule.decay else grad
    mean = torch.lerp(first, grad, 1.0 - beta1)
    square = beta2 * second + (1.0 - beta2) * grad * grad
    _put(first, mean, finite)
    _put(second, square, finite)
    if rule.name == "lamb":
        way = mean / of_mean / (square.sqrt() / root + rule.eps) + rule.decay * param
        if rule.adapt:
            weights, length = torch.linalg.vector_norm(param), torch.linalg.vector_norm(way)
            rate = rate * torch.where((weights > 0) & (length > 0), weights / length, 1.0)
        _put(param, param - _as_constants(rate.to(root)) * way, finite)
        return
    start = (
        param if rule.name == "adam" else param * _as_constants((1.0 - rate * rule.decay).to(root))
    )
    step = _as_constants((rate / of_mean).to(root))
    _put(param, start - step * mean / (square.sqrt() / root + rule.eps), finite)


def _put(into: Tensor, value: Tensor, finite: Tensor) -> None:
    into.copy_(torch.where(finite, value, into))
