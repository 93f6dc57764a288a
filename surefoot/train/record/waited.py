"""Tells of a rank that the others wait for: a record and a line, once it is established, and a line once it keeps up again."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from surefoot.components.stability import GuardFault
from surefoot.contract.state import StepReport
from surefoot.core.ranks.stragglers import ADVICE
from surefoot.train import environment
from surefoot.train.record.telling import Telling
from surefoot.train.step.pace import Paces


@final
class Waited:
    """Does one step when called with its number, and tells what was heard in it of the step before."""

    def __init__(self, step: Callable[[int], StepReport], paces: Paces, telling: Telling) -> None:
        self._step, self._paces, self._telling = step, paces, telling

    def __call__(self, number: int) -> StepReport:
        report = self._step(number)
        for named, over in self._paces.take_told():
            for each in named:
                fault = GuardFault(number - 1, "straggler", f"the run goes on; {ADVICE[each.cause]}", each.words)
                self._telling.write(environment.fault(self._telling.generation, fault))
                self._telling.warn(f"step {fault.step}: {fault.detail}; {ADVICE[each.cause]}")
            for rank in over:
                self._telling.say(f"step {number - 1}: rank {rank} keeps up again")
        return report
