"""Output of a run to `events.jsonl`, TensorBoard and the console, timed as phase "logging"."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.components.data.loader.batches import LoaderNotice
from surefoot.components.data.loader.loader import Loader
from surefoot.components.observe.console import Console
from surefoot.components.observe.journal import Journal, NoJournal
from surefoot.components.observe.tensorboard import TensorBoardOfRun
from surefoot.components.profiler.phases.clock import LOGGING, PhaseClock
from surefoot.components.stability.guard import Guard, GuardFault
from surefoot.contract import events
from surefoot.core import place
from surefoot.core.errors import StorageError
from surefoot.train import environment
from surefoot.train.evaluate import Evaluation
from surefoot.train.record.noticed.movement import Movement
from surefoot.train.session.folder import Chosen

if TYPE_CHECKING:
    from surefoot.train.assemble import Assembly
    from surefoot.train.record.compiling import Compiling
    from surefoot.train.resume.program import Program
    from surefoot.train.session.session import Progress


@dataclass(frozen=True, kw_only=True)
class RunDamage:
    """Damage found in the folder of a resumed run: in its log, checkpoints, ledger and data."""

    log: Sequence[str] = ()
    commits: Sequence[str] = ()
    lost_commits: str = ""  # text on checkpoints that the log names but that are missing
    num_lost_rows: int = 0
    other_data: str = ""  # text on how the data differ from the data trained on


class RunLog:
    """Log and console of one attempt at a run or at an attached loop.

    Args:
        journal: Writer of the log.
        console: What a person sees.
        clock: Clock that times the writing as phase "logging".
        generation: Number of the attempt.
    """

    def __init__(
        self, journal: Journal | NoJournal, console: Console, clock: PhaseClock, generation: int
    ) -> None:
        self.journal, self.console = journal, console
        self.generation, self._clock = generation, clock

    def say(self, text: str) -> None:
        with self._clock.within(LOGGING):
            self.console.say(text)

    def warn(self, text: str) -> None:
        """Print a warning, even with `quiet`."""
        with self._clock.within(LOGGING):
            self.console.warn(text)

    def write(self, event: events.Event) -> None:
        """Write `event` to the log."""
        with self._clock.within(LOGGING):
            self._record(event)

    def fault(self, fault: GuardFault) -> None:
        """Record and print a fault, even with `quiet`."""
        with self._clock.within(LOGGING):
            self._record(environment.fault(self.generation, fault))
            self.console.warn(f"{fault.detail}; {fault.action}")

    def log_checkpoint(
        self,
        step: int,
        num_bytes: int,
        program: Program,
        *,
        elapsed_s: float,
        waited_s: float,
    ) -> None:
        """Record that a checkpoint of `num_bytes` bytes is on disk; training waited `waited_s`.

        Modules that `program` has imported since the last record are named.
        """
        self.write(
            events.Committed(
                generation=self.generation,
                time_s=time.time(),
                step=step,
                num_bytes=num_bytes,
                folder=f"checkpoints/step-{step:012d}",
                elapsed_s=elapsed_s,
                waited_s=waited_s,
                late_modules=program.take_late_modules(),
            )
        )

    def tell_damage(self, damage: RunDamage, step: int) -> None:
        """Record and print the damage found in the folder of a run that resumes after `step`."""
        for line in damage.log:
            self.fault(Guard.damaged_log(step, line))
        for trouble in damage.commits:
            self.fault(Guard.damaged_commit(step, trouble))
        if damage.lost_commits:
            self.fault(Guard.lost_commit(step, damage.lost_commits))
        if damage.num_lost_rows:
            self.fault(Guard.damaged_ledger(step, damage.num_lost_rows))
        if damage.other_data:
            self.fault(
                GuardFault(step, "other-data", "the run resumes with these data", damage.other_data)
            )

    def _record(self, event: events.Event) -> None:
        trouble = self.journal.write(event)
        if trouble is not None:
            self.console.warn(trouble)


class Telling(RunLog):
    """Outputs of one attempt. An output with a storage error is dropped; the run continues."""

    def __init__(
        self,
        journal: Journal | NoJournal,
        tensorboard: TensorBoardOfRun,
        console: Console,
        guard: Guard,
        clock: PhaseClock,
        generation: int,
        compiling: Compiling | None = None,
        movement: Movement | None = None,
    ) -> None:
        super().__init__(journal, console, clock, generation)
        self._tensorboard, self._guard = tensorboard, guard
        self._compiling, self._movement = compiling, movement

    def begin(self, notes: Sequence[str], warnings: Sequence[str]) -> None:
        """Print notes at the start of a run, and warnings, the latter even with `quiet`."""
        with self._clock.within(LOGGING):
            for warning in warnings:
                self.console.warn(warning)
        for note in notes:
            self.say(note)

    def write(self, event: events.Event) -> None:
        """Write `event` to the log and to TensorBoard."""
        with self._clock.within(LOGGING):
            self._record(event)
            try:
                self._tensorboard.write(event)
            except StorageError as error:
                self.give_up("TensorBoard", error, getattr(event, "step", 0))

    def judge(self, step: int) -> None:
        """Record what the non-finite check found in the steps up to `step`, and compilations.

        All ranks find the same. Rank 0 prints it, even with `quiet`. Raises TaskError if the spec
        allows fewer recompilations.
        """
        for fault in self._guard.judge(step):
            self.write(environment.fault(self.generation, fault))
            if fault.is_printed and not place.here().rank:
                self.warn(f"step {fault.step}: {fault.detail}; {fault.action}")
        if self._compiling is not None:
            self._tell_compiled(self._compiling, step)

    def _tell_compiled(self, compiling: Compiling, step: int) -> None:
        """Record the compilations up to `step`.

        Raises TaskError if the spec allows fewer recompilations.
        """
        found = compiling.take(step)
        for each in found.compilations:
            self.write(
                events.Compiled(
                    generation=self.generation, time_s=time.time(), step=step, **vars(each)
                )
            )
        for line in found.lines:
            self.say(f"step {step}: {line}")
        for detail, action in found.faults:
            self.fault(GuardFault(step, "compile", action, detail))
        compiling.raise_if_over()

    def log_evaluation(
        self, event: events.Evaluated, epoch: float, result: Evaluation, *, names_split: bool
    ) -> None:
        """Record an evaluation and print its score; with `names_split`, the split too."""
        with self._clock.within(LOGGING):
            self.write(event)
            unit = result.units.get(result.score, "")
            name = f"{event.split} {result.score}" if names_split else result.score
            self.console.evaluated(event.step, epoch, name, result.value, unit, event.best)

    def give_up(self, what: str, error: StorageError, step: int) -> None:
        """Record and print that the output `what` is dropped because of a storage error."""
        self.fault(self._guard.storage_fault(step, error.message, what))

    def room_made(self, deleted: str, step: int) -> None:
        """Record that the checkpoints named in `deleted` were deleted because the disk was full."""
        self.fault(self._guard.full_disk(step, deleted))

    def slow_save(self, step: int, words: str) -> None:
        """Record that a save takes longer than the time until the next save is due."""
        self.fault(self._guard.slow_save(step, words))

    def subscribe(self, loader: Loader) -> Callable[[], None]:
        """Subscribe to the notices of the loader: failed workers, waiting steps, number of workers.

        Returns the function that ends the loader's workers.
        """
        loader.tell = self._tell_of_data
        return loader.end

    def of_evaluation(self, split: str, step: int) -> Callable[[LoaderNotice], None]:
        """Return a function that reports loader notices of an evaluation after `step`."""
        return lambda told: self._tell_of_data(
            told._replace(step=step, what=f"evaluating on {split}: {told.what}")
        )

    def _tell_of_data(self, told: LoaderNotice) -> None:
        if told.kind == "tuned":
            self.say(f"step {told.step}: {told.what}")
        else:
            self.fault(
                GuardFault(told.step, told.kind, told.then, f"step {told.step}: {told.what}")
            )

    def end(self, step: int) -> None:
        """Record a fault if training has changed no weight up to `step`, and close TensorBoard."""
        unmoved = self._movement.describe_none(step) if self._movement is not None else ""
        if unmoved:
            self.fault(
                GuardFault(
                    step,
                    "no-movement",
                    "check the learning rate, the gradients and optim.freeze",
                    unmoved,
                )
            )
        try:
            with self._clock.within(LOGGING):
                self.journal.flush()
                self._tensorboard.close()
        except StorageError as error:
            self.give_up("TensorBoard", error, step)


def open_records(
    home: Path, chosen: Chosen, *, is_first: bool, wanted: bool | None, step: int
) -> tuple[Journal | NoJournal, TensorBoardOfRun]:
    """Open the log and TensorBoard of a rank in `home`; neither if the run has ended before.

    Only rank 0 (`is_first`) writes TensorBoard, if it is `wanted`; `step` is the last one restored.
    """
    tensorboard = TensorBoardOfRun(
        home,
        wanted=wanted if is_first and chosen.done is None else False,
        purge_step=step + 1 if chosen.is_again else None,
    )
    return Journal(home) if chosen.done is None else NoJournal(), tensorboard


def make_telling(
    assembly: Assembly,
    generation: int,
    journal: Journal | NoJournal,
    tensorboard: TensorBoardOfRun,
    console: Console,
    progress: Progress,
) -> Telling:
    """Return the outputs of an attempt."""
    engine, compiling = assembly.engine, None
    if engine.compiled is not None:
        from surefoot.train.record.compiling import Compiling

        compiling = Compiling(engine.compiled, assembly.spec.compile)
    return Telling(
        journal,
        tensorboard,
        console,
        progress.guard,
        engine.steps.clock,
        generation,
        compiling,
        Movement(assembly.model, progress.step),
    )
