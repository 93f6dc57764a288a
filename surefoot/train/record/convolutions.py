"""cuDNN benchmarking (train.cudnn_benchmark), which is switched off if batches have many shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from surefoot.contract.state import StepReport
from surefoot.runtime.nested_tensors import find_tensors
from surefoot.train.record.telling import Telling
from surefoot.train.step import Stepper

MAX_SHAPES = 8  # of whole batches: one, the short last one, and some more


@final
class TimedConvolutions:
    """Step function that switches cuDNN benchmarking off after batches of more than 8 shapes.

    For each new shape, cuDNN would search its algorithms again.
    """

    def __init__(
        self, step: Callable[[int], StepReport], stepper: Stepper, telling: Telling
    ) -> None:
        self._step, self._stepper, self._telling = step, stepper, telling
        self._shapes: set[tuple[torch.Size, ...]] = set()
        stepper.saw = lambda batch: self._shapes.add(
            tuple(each.shape for each in find_tensors(batch))
        )

    def __call__(self, number: int) -> StepReport:
        if self._stepper.saw is not None and len(self._shapes) > MAX_SHAPES:
            self._stepper.saw = None
            torch.backends.cudnn.benchmark = False
            said = (
                f"batches had {len(self._shapes)} shapes so far, and cuDNN times its "
                "algorithms again for each new shape"
            )
            self._telling.warn(
                f"step {number}: train.cudnn_benchmark is off from this step on: {said}"
            )
        return self._step(number)
