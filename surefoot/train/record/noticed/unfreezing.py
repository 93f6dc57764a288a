"""Check before each step for parameters that were unfrozen or added since the previous step."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from surefoot.contract.state import StepReport
from surefoot.train.assemble import Assembly
from surefoot.train.record.telling import Telling

# steps after which all modules are checked: some layers are created in the first forward pass
NUM_LOOKED_AT = 2


@final
class Unfreezing:
    """Step function that starts to train parameters that the user's loop has unfrozen.

    Frozen parameters are checked before each step. All modules are checked in the first steps and
    after each log interval.
    """

    def __init__(
        self, step: Callable[[int], StepReport], assembly: Assembly, telling: Telling
    ) -> None:
        self._step, self._assembly, self._telling = step, assembly, telling
        self._frozen = assembly.trained.frozen()
        self._ends_window = assembly.course.rhythm(assembly.spec.observe.every)
        self._num_left, self._num_told = NUM_LOOKED_AT, len(assembly.trained.unfrozen)

    def __call__(self, number: int) -> StepReport:
        trained = self._assembly.trained
        is_look = self._num_left or self._ends_window(number - 1)
        if (is_look and trained.has_changed()) or (
            self._frozen and any(each.requires_grad for each in self._frozen)
        ):
            trained.take_new(self._assembly)
            self._frozen = trained.frozen()
        self._num_left = max(0, self._num_left - 1)
        if len(trained.unfrozen) > self._num_told:  # a save may have added them
            for names in trained.unfrozen[self._num_told :]:
                self._telling.say(
                    f"step {number}: {len(names)} parameters that were frozen are "
                    f"trained from this step on, the first is {names[0]}"
                )
            self._num_told = len(trained.unfrozen)
        return self._step(number)
