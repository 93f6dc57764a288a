"""Out-of-memory handling of a step: report and end the run, or repeat with half the microbatch."""

from __future__ import annotations

import functools
import gc
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.profiler.phases.clock import BACKWARD, FORWARD
from surefoot.components.stability.guard import GuardFault
from surefoot.contract.state import StepReport
from surefoot.runtime.attributes.generators import random_states, restore_random
from surefoot.train.assemble import Assembly
from surefoot.train.failure.blame import is_out_of_memory
from surefoot.train.record.telling import Telling
from surefoot.train.step.program import Observers


class WithinMemory:
    """Step function that handles failed allocations; called with the number of the step.

    It raises OutOfMemory with the memory in use and with changes that would save memory. With
    memory.on_oom = "halve", it instead repeats the step from the same state with half the
    microbatch, if the forward or backward pass ran out of memory before any weight changed. The
    following steps use the smaller microbatch too.
    """

    def __init__(
        self, assembly: Assembly, telling: Telling, folder: Path, observers: Observers
    ) -> None:
        self._assembly, self._telling, self._folder = assembly, telling, folder
        self._observers, self._has_moved = observers, False  # whether the weights may have
        observers.before_update.append(self._before_update)
        self._halves = assembly.spec.memory.on_oom == "halve"

    @functools.cached_property
    def _take(self) -> Callable[[int], StepReport]:
        """The step function, made at the first step, when all observers are known."""
        return self._assembly.engine.steps.step_function(self._observers)

    def _before_update(self) -> None:
        self._has_moved = True

    def __call__(self, number: int) -> StepReport:
        while True:
            self._has_moved = False
            before = random_states() if self._halves else {}
            try:
                return self._take(number)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                from surefoot.train.failure import account

                shortage = account.describe_shortage(error, self._assembly, number)
                account.write_segments(self._folder, self._assembly)
                traceback.clear_frames(error.__traceback__)  # releases the tensors of the step
                reason = self._reason_against(shortage.phase)
                if not self._halves or reason is not None:
                    then = f"; memory.on_oom is 'halve', but {reason}" if self._halves else ""
                    raise account.report_shortage(
                        shortage, self._assembly, self._folder, then
                    ) from error
            self._assembly.engine.steps.buffers.restore()
            self._release_memory()
            restore_random(before)
            feed = self._assembly.feed
            feed.microbatch = account.halve_microbatch(feed.microbatch)
            done = (
                f"this step is repeated with microbatch {feed.microbatch}, and later steps keep it"
            )
            self._telling.fault(
                GuardFault(number, "memory", done, f"step {number}: {shortage.words}")
            )

    def _reason_against(self, phase: int) -> str | None:
        if self._has_moved:
            return (
                "the optimizer step had started: weights may be partly updated, and "
                "the step cannot be repeated"
            )
        if phase not in (FORWARD, BACKWARD):
            return "this phase of the step needs as much memory with a smaller microbatch"
        if isinstance(self._assembly.feed.source, Iterated):
            return "the data give whole batches, or their parts of train.microbatch samples"
        if self._assembly.feed.microbatch == 1:
            return "the microbatch is one sample already"
        if self._assembly.task.state is not None:
            return "the task has a state(), which the forward passes of this step may have changed"
        return None

    def _release_memory(self) -> None:
        """Release the memory of a failed step before the step is repeated."""
        gc.collect()
        if self._assembly.engine.device.type == "cuda":
            torch.cuda.empty_cache()
