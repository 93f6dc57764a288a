"""LARS and LAMB, two optimizers for large batches.

The step of each layer is proportional to the norm of its weights. Both are subclasses of
torch.optim.Optimizer. If `fused` is True in a parameter group, torch's fused kernels update it. The
gradients are then divided by `grad_scale`, and nothing changes if `found_inf` is 1. All of this
happens on the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from surefoot.components.optim import fused
from surefoot.components.optim.kinds.by_group import ByGroup, Traced
from surefoot.core.errors import RenamedKeyWarning

# settings of a group, as the checkpoints of the previous release name them
PREVIOUS_NAMES = {"trust": "trust_coefficient"}


class _Layerwise(ByGroup):
    """Base class of LARS and LAMB.

    A parameter group whose `fused` is None becomes fused if all of its parameters are floating
    point and on a device with fused kernels. If each rank holds only a part of a layer,
    `join_norms` computes the norms of the whole layers from those of the parts.
    """

    join_norms: Callable[[Tensor], Tensor] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["fused"] is None:
            group["fused"] = all(
                each.device.type in fused.FUSED_DEVICES and each.is_floating_point()
                for each in group["params"]
            )

    def _norms(self, some: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the 2-norms of the tensors `some`, and of the tensors `others`, as two vectors.

        If each rank holds only parts of the tensors, these are the norms of the whole tensors.
        """
        norms = fused.norms_of(some), fused.norms_of(others)
        if self.join_norms is None:
            return norms
        first, second = self.join_norms(torch.cat(norms)).chunk(2)
        return first, second


@final
class Lars(_Layerwise):
    """Layer-wise adaptive rate scaling (LARS).

        r = trust_coefficient * |w| / (|g| + decay * |w|)
        v = momentum * v + lr * r * (g + decay * w)
        w = w - v

    This is algorithm 1 of You, Gitman and Ginsburg, "Large Batch Training of Convolutional
    Networks", 2017 (https://arxiv.org/abs/1708.03888), in which the momentum includes the learning
    rate. The paper's polynomial decay of `lr` is left to a schedule. A layer is one tensor. If |w|
    or |g| is 0, r is 1; the paper does not define this case.

    Args:
        params: Parameters or groups, as for torch's optimizers.
        lr: Learning rate.
        momentum: Coefficient of the momentum.
        weight_decay: Coefficient `decay`.
        trust_coefficient: Trust coefficient of r.
        adapt: False makes r 1 for all layers. A group may have a different value, for example for
            biases and norms.
        fused: Use fused kernels, which do not wait for the device, as in torch's optimizers. None
            uses them for each group whose parameters are all floating point and on a device with
            such kernels.
        trust: The deprecated name of `trust_coefficient`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        adapt: bool = True,
        fused: bool | None = None,
        trust: float | None = None,
    ) -> None:
        if trust is not None:
            _warn_of_trust()
            trust_coefficient = trust
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust_coefficient": trust_coefficient,
                "adapt": adapt,
                "fused": fused,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "trust" in param_group:
            _warn_of_trust()
            _rename_trust(param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            _rename_trust(group)

    def create_state(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(
                    parameter, memory_format=torch.preserve_format
                )

    def traced(self, group: dict[str, Any]) -> Traced:
        params = list(group["params"])
        return params, [], [], [], [self.state[each]["momentum_buffer"] for each in params]

    def _move(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        lr: float | Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        if grad_scale is not None:
            # in place, as torch's kernels leave the scaled gradients
            fused.scale_gradients(grads, 1.0 / grad_scale)
        rates: float | Tensor = lr
        if group["adapt"]:
            weights, slopes = self._norms(params, grads)
            whole = slopes + group["weight_decay"] * weights
            rates = lr * torch.where(
                (weights > 0) & (slopes > 0), group["trust_coefficient"] * weights / whole, 1.0
            )
        decays = _scalars_per_parameter(rates * group["weight_decay"], params)
        moves = fused.times(grads, _scalars_per_parameter(rates, params))
        fused.add_products(moves, params, decays)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in params]
        with fused.in_one_layout([params, moves, buffers]) as (alike, steps, held):
            sgd(
                alike,
                steps,
                [*held],
                momentum=group["momentum"],
                lr=1.0,
                weight_decay=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                fused=group["fused"],
                foreach=not group["fused"],
                found_inf=found_inf,
            )


@final
class Lamb(_Layerwise):
    """Layer-wise adaptive moments (LAMB).

        m = beta1 * m + (1 - beta1) * g          v = beta2 * v + (1 - beta2) * g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + decay * w
        w = w - lr * |w| / |u| * u

    This is algorithm 2 of You et al., "Large Batch Optimization for Deep Learning: Training BERT in
    76 minutes", 2019 (https://arxiv.org/abs/1904.00962). The paper leaves two choices open. Here,
    phi(z) is z, and the ratio |w| / |u| counts as 1 if |w| or |u| is 0. A layer is one tensor.

    Args:
        params: Parameters or groups, as for torch's optimizers.
        lr: Learning rate.
        betas: Decay rates of m and v.
        eps: Term added to the denominator.
        weight_decay: Coefficient `decay`.
        adapt: False makes the ratio 1 for all layers. A group may have a different value, for
            example for biases and norms.
        fused: Use fused kernels, which do not wait for the device, as in torch's optimizers. None
            uses them for each group whose parameters are all floating point and on a device with
            such kernels.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "adapt": adapt,
                "fused": fused,
            },
        )

    def create_state(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(
                    (), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu"
                )
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def traced(self, group: dict[str, Any]) -> Traced:
        params = list(group["params"])
        steps, first, second = (
            [self.state[each][name] for each in params]
            for name in ("step", "exp_avg", "exp_avg_sq")
        )
        return params, steps, first, second, []

    def _move(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        lr: float | Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        # the kernel accepts grad_scale in fp32 only
        if grad_scale is not None and grad_scale.dtype == torch.float64:
            fused.scale_gradients(grads, 1.0 / grad_scale)
            grad_scale = None
        states = [self.state[parameter] for parameter in params]
        moves = fused.times(params, float(group["weight_decay"]))
        rows = [
            moves,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
        ]
        with fused.in_one_layout(rows) as (alike, slopes, first, second):
            adam(  # Adam on decay * w with lr -1, which adds the direction to it
                alike,
                slopes,
                first,
                second,
                [],
                [state["step"] for state in states],
                lr=-1.0,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=0.0,
                amsgrad=False,
                maximize=False,
                fused=group["fused"],
                foreach=not group["fused"],
                has_complex=any(map(torch.is_complex, params)),
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
        rates: float | Tensor = lr
        if group["adapt"]:
            weights, lengths = self._norms(params, moves)
            rates = lr * torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
        if found_inf is not None:
            rates = rates * (1.0 - found_inf)
        fused.add_products(params, moves, _scalars_per_parameter(rates, params), sign=-1)


def _rename_trust(settings: dict[str, Any]) -> None:
    if "trust" in settings:
        settings[PREVIOUS_NAMES["trust"]] = settings.pop("trust")


def _warn_of_trust() -> None:
    text = "trust of Lars is now trust_coefficient; the next release will not read trust"
    warnings.warn(text, RenamedKeyWarning, stacklevel=3)


def _scalars_per_parameter(rates: float | Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return one scalar tensor for each parameter.

    `rates` is one value for all parameters, or a vector with an element for each. The dtype of a
    scalar is that of its parameter, but at least fp32.
    """
    made = torch.as_tensor(
        rates, dtype=None if isinstance(rates, Tensor) else torch.float64, device=params[0].device
    )
    by_dtype = {
        wide: made.to(wide)
        for wide in {torch.promote_types(each.dtype, torch.float32) for each in params}
    }
    if len(by_dtype) == 1:
        (one,) = by_dtype.values()
        return list(one.unbind()) if one.ndim else [one] * len(params)
    found = [by_dtype[torch.promote_types(each.dtype, torch.float32)] for each in params]
    return [each[number] if each.ndim else each for number, each in enumerate(found)]
