"""Check that training has changed a weight, so that a run that trains nothing is reported."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LOOKED_AT = 4096  # elements of each parameter, at even strides


class Movement:
    """Sampled values of the trained parameters after `step`, at the start of an attempt."""

    def __init__(self, model: nn.Module, step: int) -> None:
        self._step = step
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._before = [_sample_values(parameter) for parameter in self._parameters]

    def describe_none(self, step: int) -> str:
        """Return a message if no trained parameter has changed up to `step`; "" otherwise."""
        held = [before for before in self._before if before.numel()]
        if (
            step <= self._step
            or not held
            or any(
                not _is_same(_sample_values(now), before)
                for now, before in zip(self._parameters, self._before, strict=True)
            )
        ):
            return ""
        return (
            f"no weight changed in steps {self._step + 1:,} to {step:,}: the "
            f"{len(held)} parameters have their old values (up to {LOOKED_AT:,} "
            "elements of each were compared)"
        )


def _is_same(now: Tensor, before: Tensor) -> bool:
    return now.shape == before.shape and bool(torch.equal(now, before))


def _sample_values(parameter: Tensor) -> Tensor:
    """Return sampled elements of a parameter; for a sharded parameter, of the rows on this rank."""
    own: Tensor = parameter.detach()
    own = own.to_local() if hasattr(own, "to_local") else own
    flat = own.reshape(-1) if own.is_contiguous() else own.flatten()
    return flat[:: max(1, -(-flat.numel() // LOOKED_AT))].cpu().clone()
