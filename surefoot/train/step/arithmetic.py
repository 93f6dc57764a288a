"""The end of a step as arithmetic that a compiler sees into: norm, guard, clip, and the rules of Adam, AdamW and SGD, without a branch.

The formulas are those of torch's fused kernels (`components/optim/fused`), so both give the same numbers but for rounding. Where the
norm or a loss is not finite every tensor keeps its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm
Tensors = list[Tensor]


@dataclass(frozen=True)
class Rule:
    """What a group of parameters is moved by, apart from its rate."""

    name: str
    decay: float
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False

    @classmethod
    def of(cls, name: str, group: dict[str, Any]) -> Rule:
        if name == "sgd":
            return cls(name, group["weight_decay"], momentum=group["momentum"], nesterov=group["nesterov"])
        return cls(name, group["weight_decay"], betas=tuple(group["betas"]), eps=group["eps"])


def move(
    rules: Sequence[Rule], held: Sequence[tuple[Tensors, ...]], grads: Sequence[Tensor | None], rates: Sequence[Tensor],
    losses: Sequence[Tensor], clip: float, clip_value: float | None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:  # fmt: skip
    """Move every tensor of `held` (parameters, counters, first, second moments, momentum, of each group) by its gradient, in place.

    A parameter without one stays as it is, with all that is kept of it.

    Returns the global norm of the gradients, not a number where a loss is none, whether it is finite (where not, nothing moves), and
    the gradients as they were applied, which is what the fused kernels leave behind, too.
    """
    norms = [torch.linalg.vector_norm(grad) for grad in grads if grad is not None]
    if not norms:
        return torch.zeros_like(losses[0]), torch.zeros_like(losses[0], dtype=torch.bool), list(grads)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for loss in losses:
        norm = norm + 0.0 * loss
    finite = torch.isfinite(norm)
    factor = torch.where(finite, (clip / (norm + CLIP_EPS)).clamp(max=1.0), 1.0) if clip else None
    limited = [None if grad is None else _limited(grad, factor, clip_value) for grad in grads]
    left = iter(limited)
    for rule, tensors, rate in zip(rules, held, rates, strict=True):
        _move_group(rule, tensors, [next(left) for _ in tensors[0]], rate, finite)
    return norm, finite, limited


def _limited(grad: Tensor, factor: Tensor | None, limit: float | None) -> Tensor:
    grad = grad if factor is None else grad * factor
    return grad if limit is None else grad.clamp(-limit, limit)


def _move_group(rule: Rule, tensors: tuple[Tensors, ...], grads: Sequence[Tensor | None], rate: Tensor, finite: Tensor) -> None:
    params, counters, first, second, momentum = tensors
    is_shared = len(counters) < len(params)
    if is_shared:  # where only some move, those count by themselves from the next step on: FusedGroup.count_traced
        counted = [counters[0] + finite] * len(params) if counters else []
        if counters and all(grad is not None for grad in grads):
            counters[0].copy_(counted[0])
    else:
        for counter, grad in zip(counters, grads, strict=True):
            if grad is not None:
                counter.add_(finite)
        counted = counters
    for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad is None:
            continue
        if rule.name == "sgd":
            grad = grad + rule.decay * param
            if rule.momentum:
                moved = rule.momentum * momentum[number] + grad
                grad = grad + rule.momentum * moved if rule.nesterov else moved
                _put(momentum[number], moved, finite)
            _put(param, param - rate * grad, finite)
            continue
        beta1, beta2 = rule.betas
        count, wide = counted[number].double(), torch.promote_types(param.dtype, torch.float32)
        step = (rate / (1.0 - beta1**count)).to(wide)
        root = (1.0 - beta2**count).sqrt().to(wide)
        start = param if rule.name == "adam" else param * (1.0 - rate * rule.decay).to(wide)
        grad = grad + rule.decay * param if rule.name == "adam" and rule.decay else grad
        mean = torch.lerp(first[number], grad, 1.0 - beta1)
        square = beta2 * second[number] + (1.0 - beta2) * grad * grad
        _put(first[number], mean, finite)
        _put(second[number], square, finite)
        _put(param, start - step * mean / (square.sqrt() / root + rule.eps), finite)


def _put(into: Tensor, value: Tensor, finite: Tensor) -> None:
    into.copy_(torch.where(finite, value, into))
