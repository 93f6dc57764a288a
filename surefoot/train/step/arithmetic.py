"""The end of a step as arithmetic that a compiler sees into: norm, guard, clip, and the rules of Adam, AdamW, SGD, LARS and LAMB, without
a branch.

The formulas are those of torch's fused kernels (`components/optim/fused`) and of `components/optim/kinds/layerwise`, so both give the
same numbers but for rounding. Where the
norm or a loss is not finite every tensor keeps its value.
"""

from __future__ import annotations

import math
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
    trust: float = 0.0
    adapt: bool = False

    @classmethod
    def of(cls, name: str, group: dict[str, Any]) -> Rule:
        if name == "sgd":
            return cls(name, group["weight_decay"], momentum=group["momentum"], nesterov=group["nesterov"])
        if name == "lars":
            return cls(name, group["weight_decay"], momentum=group["momentum"], trust=group["trust"], adapt=group["adapt"])
        return cls(name, group["weight_decay"], betas=tuple(group["betas"]), eps=group["eps"], adapt=group.get("adapt", False))


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
        if momentum or rule.name == "sgd":
            _move_by_momentum(rule, param, grad, momentum[number] if momentum else None, rate, finite)
        else:
            _move_by_moments(rule, param, grad, (counted[number], first[number], second[number]), rate, finite)


def _move_by_momentum(rule: Rule, param: Tensor, grad: Tensor, kept: Tensor | None, rate: Tensor, finite: Tensor) -> None:
    """SGD, whose rate stands outside of the momentum, and LARS, whose rate of each layer stands inside."""
    outside: float | Tensor = rate
    if rule.name == "lars":
        inside, outside = (rate * _trust(rule, param, grad)).to(grad), 1.0
        grad = inside * (grad + rule.decay * param)
    else:
        grad = grad + rule.decay * param
    if rule.momentum and kept is not None:
        moved = rule.momentum * kept + grad
        grad = grad + rule.momentum * moved if rule.nesterov else moved
        _put(kept, moved, finite)
    _put(param, param - outside * grad, finite)


def _trust(rule: Rule, param: Tensor, grad: Tensor) -> float | Tensor:
    """What LARS multiplies the rate of a layer by."""
    if not rule.adapt:
        return 1.0
    weights, slopes = torch.linalg.vector_norm(param), torch.linalg.vector_norm(grad)
    return torch.where((weights > 0) & (slopes > 0), rule.trust * weights / (slopes + rule.decay * weights), 1.0)


def _move_by_moments(
    rule: Rule, param: Tensor, grad: Tensor, kept: tuple[Tensor, Tensor, Tensor], rate: Tensor, finite: Tensor
) -> None:
    """Adam, AdamW and LAMB."""
    counted, first, second = kept
    beta1, beta2 = rule.betas
    count, wide = counted.double(), torch.promote_types(param.dtype, torch.float32)
    root = (1.0 - _power(beta2, count)).sqrt().to(wide)
    grad = grad + rule.decay * param if rule.name == "adam" and rule.decay else grad
    mean = torch.lerp(first, grad, 1.0 - beta1)
    square = beta2 * second + (1.0 - beta2) * grad * grad
    _put(first, mean, finite)
    _put(second, square, finite)
    if rule.name == "lamb":
        way = mean / (1.0 - _power(beta1, count)).to(wide) / (square.sqrt() / root + rule.eps) + rule.decay * param
        if rule.adapt:
            weights, length = torch.linalg.vector_norm(param), torch.linalg.vector_norm(way)
            rate = rate * torch.where((weights > 0) & (length > 0), weights / length, 1.0)
        _put(param, param - rate.to(wide) * way, finite)
        return
    start = param if rule.name == "adam" else param * (1.0 - rate * rule.decay).to(wide)
    step = (rate / (1.0 - _power(beta1, count))).to(wide)
    _put(param, start - step * mean / (square.sqrt() / root + rule.eps), finite)


def _power(beta: float, count: Tensor) -> Tensor:
    """beta**count, so that a compiler computes it once: of an exponential that is used again it keeps the value, a power it would
    compute anew for every element of a tensor (`should_realize_on_reuse` in torch._inductor.ir)."""
    return torch.exp(count * math.log(beta)) if beta else torch.zeros_like(count)


def _put(into: Tensor, value: Tensor, finite: Tensor) -> None:
    into.copy_(torch.where(finite, value, into))
