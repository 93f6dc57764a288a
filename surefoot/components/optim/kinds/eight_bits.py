"""Adam and AdamW with 8-bit moments.

Each value has a code of 8 bits, and each block of 256 values has one scale. Codes and rounding are
those of torchao, after Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021
(https://arxiv.org/abs/2110.02861). torchao stores the moments in a tensor subclass, dequantizes a
whole tensor at a time, and searches each code among 256. This module stores them in plain tensors,
which are saved and counted like any other. It dequantizes them piece by piece, and finds codes in a
table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from surefoot.components.optim.kinds.by_group import ByGroup
from surefoot.core.errors import SpecError
from surefoot.runtime.lowbit import torchao

BLOCK = 256  # values with one scale
MIN_ELEMENTS = 4096  # elements; 8 bits save nothing for a smaller tensor: torchao's limit
PIECE = 1 << 16  # elements dequantized at a time: they fit into the CPU cache
# dtypes of weights, which are computed in fp32
WIDENED = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("exp_avg", "exp_avg_sq")
# elements per entry of weights, and of codes and scales of both moments
SHARES = (1, 1, BLOCK, 1, BLOCK)
HALVINGS = 64  # bisections between two values, until no fp32 number is between


@dataclass(frozen=True)
class Codes:
    """Lookup tables of an 8-bit code.

    `values` are the numbers that the 256 codes represent, ascending to 1. `ends` holds, for each
    code, the smallest number that rounds to the next code. `begins` has an entry for each value of
    the upper 16 bits of an fp32 number (sign, exponent and 7 bits). The entry is the code of the
    smallest number with these bits; a larger number with these bits has the same code or the next
    one.
    """

    values: Tensor
    ends: Tensor
    begins: Tensor

    def to(self, device: torch.device) -> Codes:
        return Codes(self.values.to(device), self.ends.to(device), self.begins.to(device))

    def widen(self, codes: Tensor, scales: Tensor) -> Tensor:
        return (self.values.index_select(0, codes.int()).view(-1, BLOCK) * scales.view(-1, 1)).view(
            -1
        )

    def narrow(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize numbers: return the code of each, and the scale of each block of 256 numbers."""
        blocks = numbers.view(-1, BLOCK)
        scales = blocks.abs().amax(-1).clip(1e-12)
        scaled = (blocks / scales.view(-1, 1)).view(-1)
        codes = self.begins.index_select(0, (scaled.view(torch.int32) >> 16) + (1 << 15))
        return codes + (scaled >= self.ends.index_select(0, codes.int())), scales


@functools.cache
def load_codes() -> tuple[Codes, Codes]:
    """Return the lookup tables of torchao's signed and unsigned codes, in this order.

    They are loaded once per process. This function must not be called under FakeTensorMode, because
    it needs the values of tensors. Raises MissingExtra if torchao is not installed.
    """
    with torchao('optim.state = "8bit"'):
        from torchao.optim import quant_utils
    signed, unsigned = (
        torch.tensor(quant_utils.create_dynamic_map(signed=each)) for each in (True, False)
    )
    return _look_up(signed, quant_utils.quantize_8bit_with_qmap), _look_up(
        unsigned, quant_utils.quantize_8bit_with_qmap
    )


def _look_up(values: Tensor, find: Callable[[Tensor, Tensor], Tensor]) -> Codes:
    """Compute the lookup tables of an 8-bit code.

    `values` are the numbers that the codes represent. `find(numbers, values)` returns the code of
    each number.
    """
    low, high = values[:-1], values[1:]
    for _ in range(HALVINGS):
        middle = ((low.double() + high.double()) / 2).float()
        is_next = find(middle, values) > torch.arange(len(low))
        low, high = torch.where(is_next, low, middle), torch.where(is_next, middle, high)
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    least = torch.where(bits < 0, bits | 0xFFFF, bits).view(torch.float32)
    begins = torch.bucketize(least.nan_to_num(0.0), high, right=True).byte()
    return Codes(values, torch.cat([high, torch.tensor([torch.inf])]), begins)


def reason_unsupported(tensor: Tensor) -> str | None:
    """Return why the moments of a parameter cannot be stored in 8 bits; None if they can."""
    if tensor.numel() < MIN_ELEMENTS:
        return f"fewer than {MIN_ELEMENTS:,} elements"
    if tensor.numel() % BLOCK:
        return f"its size is not a multiple of {BLOCK}"
    return None if tensor.dtype in WIDENED else f"its dtype is {tensor.dtype}"


@final
class Adam8bit(ByGroup):
    """Adam or AdamW, as defined by torch, with both moments stored in 8 bits.

        m = beta1 * m + (1 - beta1) * g          v = beta2 * v + (1 - beta2) * g^2
        w = w - lr * decay * w - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    The formula is that of AdamW. m and v are dequantized, updated and used in fp32, and rounded to
    8 bits when they are stored.

    Args:
        params: Parameters or groups, as for torch's optimizers.
        lr: Learning rate.
        betas: Decay rates of m and v.
        eps: Term added to the denominator.
        weight_decay: Coefficient `decay`.
        decoupled: True for AdamW; False for Adam, which adds decay * w to the gradient.

    Raises:
        SpecError: For a parameter for which `reason_unsupported` returns a reason.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decoupled: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "fused": True,
        }
        self._codes: dict[torch.device, list[Codes]] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._codes = {}  # torch copies only state, groups and defaults of an optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if (reason := reason_unsupported(parameter)) is not None:
                self.param_groups.pop()
                shape = " x ".join(map(str, parameter.shape))
                raise SpecError(
                    f"a parameter of {shape or 'no dimensions'} has no 8-bit state: {reason}",
                    hint="give it to another optimizer",
                )
            self._codes_for_device(parameter.device)

    def _codes_for_device(self, device: torch.device) -> list[Codes]:
        if device not in self._codes:
            self._codes[device] = [codes.to(device) for codes in load_codes()]
        return self._codes[device]

    def create_state(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for name in NAMES:
                    state[name] = torch.zeros(
                        parameter.shape, dtype=torch.uint8, device=parameter.device
                    )
                    state[f"{name}_scale"] = torch.zeros(
                        parameter.numel() // BLOCK, device=parameter.device
                    )
            for name in NAMES:
                # torch's load_state_dict casts it to the parameter's dtype
                state[name] = state[name].byte()

    def _move(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        lr: float | Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        rate = torch.as_tensor(lr, dtype=torch.float32, device=params[0].device)
        for parameter, grad in zip(params, grads, strict=True):
            state = self.state[parameter]
            state["step"] += 1 if found_inf is None else 1 - found_inf
            weights, slopes = parameter.contiguous().view(-1), grad.contiguous().view(-1)
            rows = [
                weights,
                *(row for name in NAMES for row in (state[name].view(-1), state[f"{name}_scale"])),
            ]
            for start in range(0, len(weights), PIECE):
                slope = slopes[start : start + PIECE].float()
                if grad_scale is not None:
                    slope = slope / grad_scale
                before = [
                    row[start // share : (start + PIECE) // share]
                    for row, share in zip(rows, SHARES, strict=True)
                ]
                for old, new in zip(
                    before,
                    self._adam_step_8bit(group, before, slope, rate, state["step"]),
                    strict=True,
                ):
                    old.copy_(new if found_inf is None else torch.where(found_inf > 0, old, new))
            if not parameter.is_contiguous():
                parameter.copy_(weights.view(parameter.shape))

    def _adam_step_8bit(
        self,
        group: dict[str, Any],
        before: Sequence[Tensor],
        slope: Tensor,
        rate: Tensor,
        step: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return a piece of the weights, and of both moments in 8 bits, after one step.

        Args:
            group: The parameter group, with its settings.
            before: The piece before the step: weights, codes and scales of the first moment, codes
                and scales of the second moment. The result has the same order.
            slope: The gradient of the piece, in fp32.
            rate: The learning rate.
            step: The number of the step, from 1.
        """
        weights, first, first_scales, second, second_scales = before
        signed, unsigned = self._codes_for_device(weights.device)
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        wide = weights.float()
        if group["decoupled"]:
            wide = wide - rate * decay * wide
        else:
            slope = slope + decay * wide
        mean = signed.widen(first, first_scales).lerp(slope, 1 - beta1)
        square = unsigned.widen(second, second_scales).lerp(slope.square(), 1 - beta2)
        size = square.sqrt() / (1 - beta2**step).sqrt() + group["eps"]
        wide = wide - rate * (mean / (1 - beta1**step)) / size
        return (wide, *signed.narrow(mean), *unsigned.narrow(square))
