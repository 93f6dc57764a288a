"""BatchNorm over the samples of all ranks; torch's SyncBatchNorm runs only on GPUs.

In the forward pass, each rank sends its count, mean and sum of squared deviations, which can be
combined without cancellation (Chan et al., Algorithms for Computing the Sample Variance, 1983). In
the backward pass, it sends the two sums that the gradient of the normalization needs. The
statistics and gradients equal those of one process with all of these samples.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from surefoot.core.errors import TaskError
from surefoot.runtime.comm.group import ALONE, Group

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncNorm(_BatchNorm):
    """BatchNorm whose statistics in training are those of the samples of all ranks of `group`.

    Every rank must call it the same number of times. With one rank it is an ordinary BatchNorm. The
    arguments are those of torch's BatchNorm.
    """

    group: Group = ALONE

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise TaskError(
                f"a batch norm was given {input.dim()} dimensions",
                hint="give (B, C) or (B, C, ...)",
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalize `input`, (B, C) or (B, C, ...), over the samples of all ranks.

        The output has the same shape.
        """
        if not self.training or self.group.is_alone:
            made: Tensor = super().forward(input)
            return made
        self._check_input_dim(input)
        output, mean, variance, count = _SyncBatchNormFunction.apply(
            input, self.weight, self.bias, self.eps, self.group
        )  # type: ignore[no-untyped-call]
        self._update_running_statistics(mean, variance, float(count))
        joined: Tensor = output
        return joined

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """Update the running statistics as one process with the samples of all ranks would."""
        if (
            self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_((variance * (count / max(count - 1, 1))).to(self.running_var), share)


class _SyncBatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims, wide = [0, *range(2, x.dim())], x.to(torch.promote_types(x.dtype, torch.float32))
        mine = wide.mean(dims) if x.numel() else wide.new_zeros(x.shape[1])
        squares = (wide - _spread(mine, x)).square().sum(dims)
        count = torch.full((1,), x.numel() / max(1, x.shape[1]), dtype=wide.dtype, device=x.device)
        rows = group.gather(torch.cat((mine, squares, count)).to(group.device)).to(x.device)
        means, squares, counts = torch.split(rows, [x.shape[1], x.shape[1], 1], dim=1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        inverse = torch.rsqrt(variance + eps)
        normed = (wide - _spread(mean, x)) * _spread(inverse, x)
        ctx.save_for_backward(normed, inverse, weight, total)
        ctx.group, ctx.has_bias = group, bias is not None
        made = normed if weight is None else normed * _spread(weight.to(wide.dtype), x)
        made = made if bias is None else made + _spread(bias.to(wide.dtype), x)
        ctx.mark_non_differentiable(mean, variance, total)
        return made.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, *unused: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        normed, inverse, weight, total = ctx.saved_tensors
        dims, wide = [0, *range(2, grad.dim())], grad.to(normed.dtype)
        by_weight, by_bias = (wide * normed).sum(dims), wide.sum(dims)
        scale = torch.ones_like(inverse) if weight is None else weight.to(normed.dtype)
        sums = torch.cat((by_bias * scale, by_weight * scale)).to(ctx.group.device)
        of_grad, of_product = ctx.group.add(sums).to(grad.device).chunk(2)
        passed = (
            wide * _spread(scale, grad)
            - _spread(of_grad / total, grad)
            - normed * _spread(of_product / total, grad)
        )
        into = (passed * _spread(inverse, grad)).to(grad.dtype)
        return (
            into,
            None if weight is None else by_weight.to(weight.dtype),
            by_bias if ctx.has_bias else None,
            None,
            None,
        )


def _spread(channels: Tensor, like: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (like.dim() - 2))


def join_batchnorm(model: nn.Module) -> list[SyncNorm]:
    """Convert every BatchNorm of `model` into a SyncNorm, in place; return the SyncNorms.

    Each stays the same object, with its parameters, buffers, hooks and attributes. Raises TaskError
    for a model that is itself a BatchNorm, and for a BatchNorm with its own class or forward pass.
    """
    if isinstance(model, PLAIN):
        raise TaskError(
            "the model is a BatchNorm itself, which cannot be replaced from inside",
            hint="wrap it: nn.Sequential(norm)",
        )
    found = {name: module for name, module in model.named_modules() if isinstance(module, PLAIN)}
    for name, module in found.items():
        if type(module) not in PLAIN or "forward" in vars(module):
            raise TaskError(
                f"{name} is a {type(module).__name__}, a BatchNorm of your own, "
                "which would be lost",
                hint="leave train.batchnorm out",
            )
    for module in found.values():
        module.__class__ = SyncNorm  # type: ignore[assignment]
    return cast(list[SyncNorm], list(found.values()))
