"""cuDNN benchmarking (train.cudnn_benchmark), which is switched off if batches have many shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from surefoot.contract.state import StepReport
from surefoot.contract.task import Batch
from surefoot.runtime.nested_tensors import find_tensors
from surefoot.train.record.telling import Telling
from surefoot.train.step.program import Observers

MAX_SHAPES = 8  # of whole batches: one, the short last one, and some more


@final
class TimedConvolutions:
    """Step function that switches cuDNN benchmarking off after batches of more than 8 shapes.

    For each new shape, cuDNN would search its algorithms again.
    """

    def __init__(
        self, step: Callable[[int], StepReport], telling: Telling, observers: Observers
    ) -> None:
        self._step, self._telling, self._is_on = step, telling, True
        self._shapes: set[tuple[torch.Size, ...]] = set()
        observers.batch_read.append(self._on_batch)

    def _on_batch(self, batch: Batch) -> None:
        if self._is_on:
            self._shapes.add(tuple(each.shape for each in find_tensors(batch)))

    def __call__(self, number: int) -> StepReport:
        if self._is_on and len(self._shapes) > MAX_SHAPES:
            self._is_on = False
            torch.backends.cudnn.benchmark = False
            said = (
                f"batches had {len(self._shapes)} shapes so far, and cuDNN times its "
                "algorithms again for each new shape"
            )
            self._telling.warn(
                f"step {number}: train.cudnn_benchmark is off from this step on: {said}"
            )
        return self._step(number)
