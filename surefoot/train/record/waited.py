"""Report of stragglers: a record and a line when one is detected, a line when it has recovered."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from surefoot.components.stability.guard import GuardFault
from surefoot.contract.state import StepReport
from surefoot.core.ranks.stragglers import ADVICE
from surefoot.train import environment
from surefoot.train.record.telling import Telling
from surefoot.train.step.pace import Paces


@final
class WaitRecorder:
    """Step function that reports the stragglers that were detected in the previous step."""

    def __init__(self, step: Callable[[int], StepReport], paces: Paces, telling: Telling) -> None:
        self._step, self._paces, self._telling = step, paces, telling

    def __call__(self, number: int) -> StepReport:
        report = self._step(number)
        for named, over in self._paces.take_told():
            for each in named:
                fault = GuardFault(
                    number - 1, "straggler", f"the run continues; {ADVICE[each.cause]}", each.words
                )
                self._telling.write(environment.fault(self._telling.generation, fault))
                self._telling.warn(f"step {fault.step}: {fault.detail}; {ADVICE[each.cause]}")
            for rank in over:
                self._telling.say(f"step {number - 1}: rank {rank} is no longer a straggler")
        return report
