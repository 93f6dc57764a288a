"""Exponential moving average (EMA) of the weights, updated after each applied step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from surefoot.components.optim.fused import move_towards
from surefoot.components.optim.masters import publish
from surefoot.components.optim.saving import MAX_CHARACTERS
from surefoot.contract.state import mark_same_part
from surefoot.core.errors import RunFolderError


class WeightAverage:
    """EMA of the weights: average = d * average + (1 - d) * weights.

    After n updates, d is min(decay, (1 + n) / (10 + n)), as in tf.train.ExponentialMovingAverage.
    The averages start as copies of the current weights.

    Args:
        parameters: The parameters to average.
        decay: The upper limit of d.
        ramp: False makes d equal to `decay` from the first update on, as in torch.optim.swa_utils.
        buffers: Buffers to average by the same formula, such as `model.buffers()`. Integer buffers
            are copied, as AveragedModel does with use_buffers=True. Buffers that are not passed
            stay unchanged while the averages are swapped in.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        decay: float,
        *,
        ramp: bool = True,
        buffers: Iterable[Tensor] = (),
    ) -> None:
        self.decay = decay
        self.ramp = ramp
        self._num_updates: int | Tensor = 0
        self.parameters = list(parameters)
        self.averages = [
            mark_same_part(parameter.detach().clone(), parameter) for parameter in self.parameters
        ]
        self.buffers = list(buffers)
        self.buffer_averages = [buffer.detach().clone() for buffer in self.buffers]

    @property
    def num_updates(self) -> int:
        return int(self._num_updates)

    def restore(self, num_updates: int) -> None:
        """Set the number of updates to that of a checkpoint.

        The averages themselves are not restored here.
        """
        self._num_updates = num_updates

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Add further parameters to average, starting from their current values."""
        self.parameters += parameters
        self.averages += [
            mark_same_part(parameter.detach().clone(), parameter) for parameter in parameters
        ]

    @torch.no_grad()
    def begin_again(self) -> None:
        """Reset the averages to the current weights and buffers."""
        for average, tensor in zip(
            [*self.averages, *self.buffer_averages], [*self.parameters, *self.buffers], strict=True
        ):
            average.copy_(tensor)

    def by_id(self) -> dict[int, Tensor]:
        """Return the average of each parameter and buffer, by the `id` of that tensor."""
        averages = [*self.averages, *self.buffer_averages]
        return dict(zip(map(id, [*self.parameters, *self.buffers]), averages, strict=True))

    @torch.no_grad()
    def update(self, applied: bool | Tensor = True) -> None:
        """Update the averages with the current weights and buffers, if the step was applied.

        If `applied` is a tensor on the device, the host does not wait for it.
        """
        done = self._num_updates
        if isinstance(applied, Tensor):
            ramped = (1 + done) / (10 + done + torch.zeros_like(applied, dtype=torch.float32))
            decay = (
                ramped.clamp(max=self.decay) if self.ramp else torch.full_like(ramped, self.decay)
            )
            self._move((1.0 - decay) * applied)
        elif applied:
            self._move(
                1.0 - (min(self.decay, (1 + done) / (10 + done)) if self.ramp else self.decay)
            )
        self._num_updates = done + applied

    def _move(self, share: float | Tensor) -> None:
        move_towards(self.averages, [parameter.detach() for parameter in self.parameters], share)
        pairs = list(zip(self.buffer_averages, self.buffers, strict=True))
        averaged = [
            (average, buffer)
            for average, buffer in pairs
            if buffer.is_floating_point() or buffer.is_complex()
        ]
        if averaged:
            move_towards(
                [average for average, _ in averaged], [buffer for _, buffer in averaged], share
            )
        for average, buffer in pairs:
            if not (buffer.is_floating_point() or buffer.is_complex()):
                average.copy_(
                    torch.where(share > 0, buffer, average) if isinstance(share, Tensor) else buffer
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the averages; the averages are not copied."""
        return {
            "num_updates": self.num_updates,
            "averages": [*self.averages],
            "buffers": [*self.buffer_averages],
        }

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Copy the averages of a saved `state_dict()` into the averages of this object.

        Raises RunFolderError if the number or the shapes of the parameters or buffers differ.
        """
        held = {"averages": self.averages, "buffers": self.buffer_averages}
        for name, tensors in held.items():
            shapes, given = (
                [tuple(each.shape) for each in tensors],
                [tuple(each.shape) for each in saved[name]],
            )
            if shapes != given:
                kind = "parameters" if name == "averages" else "buffers"
                raise RunFolderError(
                    (
                        f"the saved averages are of {len(given)} {kind}, with shapes "
                        f"{given}, but this WeightAverage has {len(shapes)}: {shapes}"
                    )[:MAX_CHARACTERS],
                    hint=(
                        "build the WeightAverage over the same parameters and buffers, in "
                        "the same order"
                    ),
                )
        for name, tensors in held.items():
            for average, value in zip(tensors, saved[name], strict=True):
                average.copy_(value)
        self._num_updates = int(saved["num_updates"])

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put the averages into the model inside the `with` block.

        The weights are put back at its end, even after an error.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in zip(
            [*self.parameters, *self.buffers], [*self.averages, *self.buffer_averages], strict=True
        ):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)
        publish(self.parameters)
