"""Dynamic loss scaling for fp16.

The smallest positive fp16 number is 6e-8, so small gradients would underflow to zero in the
backward pass. Therefore the loss is multiplied by a scale, and the update divides the gradients by
it. If a gradient overflows, the step is skipped and the scale is halved. After `growth_interval`
steps without overflow, the scale is doubled. P. Micikevicius et al., "Mixed precision training",
2018.

    scaler = LossScaler()
    (loss_sum * scaler.scale).backward()  # every microbatch of the step
    # unscales, checks, clips and updates in one pass
    norm, applied = update.step_if_finite(1 / count / scaler.scale)
    scaler.update(not applied)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.core.errors import InputError

INITIAL, GROWTH_INTERVAL, FLOOR = 2.0**16, 2000, 1.0
LARGEST = 2.0**127  # the largest power of two in fp32


class LossScaler:
    """Loss scale that halves on overflow and doubles after enough steps without overflow.

    The scale is a power of two, so that multiplying by it is exact.

    Args:
        initial: First scale, a power of two.
        growth_interval: Number of consecutive steps without overflow after which the scale doubles.
        floor: Lowest useful scale. If the scale falls below it, `is_exhausted` is True, and the run
            should end.
        device: Device on which scale and step count are stored as tensors, so that the host does
            not wait for them; None stores them as numbers.

    Raises:
        InputError: For a scale that is not a power of two.
    """

    def __init__(
        self,
        initial: float = INITIAL,
        *,
        growth_interval: int = GROWTH_INTERVAL,
        floor: float = FLOOR,
        device: torch.device | None = None,
    ) -> None:
        if initial <= 0 or math.frexp(initial)[0] != 0.5:
            raise InputError(
                f"the loss scale is {initial:g}, which is not a power of two",
                hint="use a power of two such as 65536.0, so that scaling is exact",
            )
        self._growth_interval, self.floor, self._device = growth_interval, floor, device
        self.scale: float | Tensor = initial
        self._clean_steps: int | Tensor = 0
        self.load_state_dict({"scale": initial, "clean_steps": 0})

    def __repr__(self) -> str:
        return f"LossScaler(scale={float(self.scale):g}, clean_steps={int(self._clean_steps)})"

    def seed(self, gradient: Tensor) -> Tensor:
        """Return `gradient`, with which the backward pass starts, multiplied by the loss scale."""
        scale = self.scale
        return gradient * (scale.to(gradient.dtype) if isinstance(scale, Tensor) else scale)

    def update(self, overflowed: bool | Tensor) -> None:
        """Adjust the loss scale after a step.

        `overflowed` means that the gradients of the step were not finite, and that the step was
        skipped.
        """
        if isinstance(overflowed, Tensor) and self._device is not None:
            self._update_on_device(overflowed)
        elif overflowed:
            self.scale, self._clean_steps = self.scale * 0.5, 0
        elif int(self._clean_steps) + 1 >= self._growth_interval:
            self.scale, self._clean_steps = min(float(self.scale) * 2.0, LARGEST), 0
        else:
            self._clean_steps = self._clean_steps + 1

    def _update_on_device(self, overflowed: Tensor) -> None:
        """Adjust the loss scale on the device, without waiting for it.

        The new scale is a new tensor, so that the report of a step can keep the scale of that step.
        """
        scale, clean = (
            torch.as_tensor(self.scale),
            torch.where(overflowed, 0, self._clean_steps + 1),
        )
        grows = clean >= self._growth_interval
        self.scale = torch.where(
            overflowed, scale * 0.5, torch.where(grows, (scale * 2.0).clamp(max=LARGEST), scale)
        )
        self._clean_steps = torch.where(grows, 0, clean)

    @property
    def is_exhausted(self) -> bool:
        """True if the loss scale is below its floor.

        The gradients then overflow with any scale, so that a smaller one does not help.
        """
        return float(self.scale) < self.floor

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, and the number of steps without overflow since it last changed."""
        return {"scale": float(self.scale), "clean_steps": int(self._clean_steps)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the loss scale and the step count that `state_dict` returned."""
        self.scale, self._clean_steps = float(saved["scale"]), int(saved["clean_steps"])
        if self._device is not None:
            self.scale = torch.tensor(self.scale, device=self._device)
            self._clean_steps = torch.tensor(self._clean_steps, device=self._device)
