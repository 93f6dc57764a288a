"""An exponential moving average of the weights (EMA), updated once per applied step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from surefoot.components.optim.fused import move_towards
from surefoot.components.optim.masters import publish
from surefoot.contract.state import laid_by


class WeightAverage:
    """average = d * average + (1 - d) * weights with d = min(decay, (1 + t) / (10 + t)), t counting from 0 (as in tf.train's)."""

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self.decay = decay
        self._num_updates: int | Tensor = 0
        self.parameters = list(parameters)
        self.averages = [laid_by(parameter.detach().clone(), parameter) for parameter in parameters]

    @property
    def num_updates(self) -> int:
        return int(self._num_updates)

    def restore(self, num_updates: int) -> None:
        """Go on counting from a checkpoint's number; the averages themselves are read in place."""
        self._num_updates = num_updates

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Average these, too, from their values of now on."""
        self.parameters += parameters
        self.averages += [laid_by(parameter.detach().clone(), parameter) for parameter in parameters]

    @torch.no_grad()
    def update(self, applied: bool | Tensor = True) -> None:
        """Follow the weights after a step that was applied; where that is known on the device only, nobody waits for it."""
        done = self._num_updates
        if isinstance(applied, Tensor):
            self._move(
                (1.0 - ((1 + done) / (10 + done + torch.zeros_like(applied, dtype=torch.float32))).clamp(max=self.decay))
                * applied
            )
        elif applied:
            self._move(1.0 - min(self.decay, (1 + done) / (10 + done)))
        self._num_updates = done + applied

    def _move(self, share: float | Tensor) -> None:
        move_towards(self.averages, [parameter.detach() for parameter in self.parameters], share)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model holds the averages inside this block and its own weights again after it, whatever happens."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)
        publish(self.parameters)
