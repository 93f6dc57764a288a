"""An exponential moving average of the weights (EMA), updated once per applied step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from surefoot.components.optim.fused import move_towards


class WeightAverage:
    """average = d * average + (1 - d) * weights with d = min(decay, (1 + t) / (10 + t)), t counting from 0 (as in tf.train's)."""

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self._parameters = list(parameters)
        self.averages = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update(self) -> None:
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        move_towards(self.averages, [parameter.detach() for parameter in self._parameters], 1.0 - decay)
        self.num_updates += 1

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
        for parameter, average in zip(self._parameters, self.averages, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)
