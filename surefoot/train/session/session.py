"""Session of a run: its progress, and the record of its steps, evaluations and checkpoints."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from surefoot.components import checkpoint
from surefoot.components.checkpoint import SaveResult
from surefoot.components.observe.meter import Meter
from surefoot.components.profiler.phases import clock as phases
from surefoot.components.profiler.phases.clock import PhaseClock
from surefoot.components.stability.guard import Guard
from surefoot.contract.ledger import Ledger
from surefoot.contract.runlock import RunLock
from surefoot.contract.state import StepReport
from surefoot.core.errors import EXIT_OK, StorageError, UnknownSplitError
from surefoot.core.process.forked import OwningProcess
from surefoot.runtime.comm.group import Group
from surefoot.train.assemble import Assembly
from surefoot.train.evaluate import Evaluation
from surefoot.train.failure import blame
from surefoot.train.failure.ending import WHOLE, StopRequests
from surefoot.train.failure.script_exit import script
from surefoot.train.record.dtypes import tell_dtypes
from surefoot.train.record.peak import make_step_function
from surefoot.train.record.profiling import Profiling
from surefoot.train.record.scores import Scores
from surefoot.train.record.telling import Telling
from surefoot.train.resume import together
from surefoot.train.resume.keeper import CheckpointManager
from surefoot.train.resume.program import Program


class Progress:
    """Counters, scores and checks of a run, in all of its attempts.

    Attributes:
        step: Number of steps.
        num_samples: Number of samples that the steps were computed on.
        training_s: Seconds of training up to the last record of steps.
        before_s: Seconds of training in earlier attempts.
        ends_window: Function that returns whether a record of steps ends after the given step.
        is_resumed: Whether this attempt resumes from a checkpoint.
        other_data: Text on how the data differ from those trained on; "" if they do not.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly, self.scores = assembly, Scores(assembly)
        self.guard = Guard(
            assembly.spec.stability,
            min_scale=assembly.spec.precision.min_scale,
            total_steps=assembly.course.total_steps,
        )
        # before the first record, since it refuses an interval that does not fit
        self.ends_window = assembly.course.rhythm(assembly.spec.observe.every)
        self.step = self.num_samples = 0
        self.training_s = self.before_s = 0.0
        self.is_resumed, self.other_data = False, ""

    def restore(self, step: int, saved: Mapping[str, Any], *, accept_data: bool) -> None:
        """Restore `saved`, the state after `step`, and the position in the data.

        Raises OtherDataError if the data differ from those trained on and `accept_data` is false.
        """
        with checkpoint.as_run_folder_errors(f"the state after step {step:,}"):
            self.step = step
            self.num_samples = int(saved["num_samples"])
            self.training_s = float(saved["clock"]["training_s"])
            self.scores.restore(saved["scores"], saved["clock"])
            self.guard.restore(saved["guard"])
            self._loader.restore(saved)
        self.other_data = together.find_data(self._assembly, step + 1, accept=accept_data)
        self.before_s, self.is_resumed = self.training_s, True

    def state(self) -> dict[str, Any]:
        """Return the counters and loader state that a checkpoint stores beside the model."""
        return {
            "num_samples": self.num_samples,
            "scores": self.scores.state(),
            "guard": self.guard.state(),
            **together.state_of(self._loader),
        }

    def score(self) -> dict[str, Any] | None:
        """Return the score of this step for its manifest; None if it was not evaluated."""
        return self.scores.score_of(self.step)

    def splits_due(self) -> tuple[str, ...]:
        """Return the splits that are due after this step, by the spec's intervals or at the end."""
        is_last = self.step == self._assembly.course.total_steps
        return self.scores.due(self.step, is_last=is_last)

    @property
    def _loader(self) -> Any:
        return self._assembly.engine.steps.reader.loader


@dataclass
class RunResult:
    """Outcome of an attempt at a run, such as "finished"; empty before its end."""

    outcome: str = ""
    cause: str = ""
    exit_code: int = EXIT_OK
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RunSession:
    """Attempt at a run whose folder is open, with all that records and saves it.

    Args:
        assembly: Parts that the run trains with.
        program: Code of the task.
        group: The ranks.
        folder: Function that returns the path of the run folder, as `make_absolute` does.
        home: Folder in which this rank logs.
        lock: Lock of the run folder.
        progress: Counters, scores and checks.
        keeper: Manager of the checkpoints.
        ledger: Ledger of the samples that the steps read.
        telling: Log, TensorBoard and console.
        profiling: Windows of the profiler.
        stops: Requests to end the run.
        started_s: Start of the attempt in seconds, by `time.perf_counter`.
    """

    assembly: Assembly
    program: Program
    group: Group
    folder: Callable[[], Path]
    home: Path
    lock: RunLock
    progress: Progress
    keeper: CheckpointManager
    ledger: Ledger | together.NoLedger
    telling: Telling
    profiling: Profiling
    stops: StopRequests
    started_s: float
    result: RunResult = field(default_factory=RunResult)

    def __post_init__(self) -> None:
        self.owner, self._meter = OwningProcess(), Meter()
        self._clock: PhaseClock = self.assembly.engine.steps.clock
        self._first_step = self.progress.step + 1
        self._reader = self.assembly.engine.steps.reader

    # ---- steps

    def begin_steps(self) -> Callable[[], StepReport]:
        """Return a function that takes the next step; evaluate first if an evaluation is owed."""
        if (owed := self.progress.scores.take_owed()) is not None:
            self.keeper.saved_step = 0  # so that the step is saved again, with it
            self.evaluate(owed)
            for split in self.progress.splits_due():
                if split in self.progress.scores.left(self.progress.step):
                    self.evaluate(split)
        self._first_step = self.progress.step + 1
        self._meter.restart_clock()
        take_step = make_step_function(self.assembly, self.telling, self.home)
        self._clock.begin_steps()

        def take_next() -> StepReport:
            number = self.progress.step + 1
            try:
                return take_step(number)
            except (Exception, SystemExit) as error:
                if self.stops.is_leaving:
                    raise
                raise blame.as_run_error(error, f"{self.group.place}step {number}:") from error

        return take_next

    def step_done(self, report: StepReport) -> None:
        """Record a step: its samples, its losses, and what the checks find in it."""
        number = self.progress.step = report.step
        self.ledger.add(number, self._reader.consumed)
        self.progress.num_samples += report.num_samples
        self._meter.add(report)
        self.progress.guard.watch(report)
        if self.progress.ends_window(number) or number == 1 or report.was_applied is False:
            self.close_window()
        if number == self._first_step:
            tell_dtypes(self.assembly, self.telling, number)
        self.profiling.step_done(report)

    def save_if_due(self) -> None:
        """Save after a step if a checkpoint is due, else report a save that is done."""
        if self.keeper.is_due(self.progress.step):
            self._commit()
        else:
            self.keeper.settle(self.on_save)

    def is_over(self) -> bool:
        """Return whether the run ends before another step; the result is the same on all ranks."""
        progress, stops, total = self.progress, self.stops, self.assembly.course.total_steps
        if total is not None and self.group.is_alone:
            return stops.outcome is not None or progress.step >= total
        is_late = False
        if total is None:
            spent_s = progress.before_s + time.perf_counter() - self.started_s
            is_late = spent_s >= self.assembly.course.length.value
        with nullcontext() if self.group.is_alone else self._clock.within(phases.COMMUNICATION):
            stop, code, is_late = together.is_over(
                self.group, stops.outcome, stops.exit_code, is_late, self.keeper
            )
        if stop is not None:  # else a signal that arrived in the meantime would be forgotten
            stops.outcome, stops.exit_code = stop, code
        return stop is not None or is_late or (total is not None and progress.step >= total)

    def end_steps(self) -> None:
        """Record the end of the steps: the run has finished unless it was stopped."""
        self.close_window()
        self.stops.outcome = self.stops.outcome or WHOLE

    def close_window(self) -> None:
        """Record the steps since the last record."""
        with self._clock.within(phases.LOGGING):
            summary = self._meter.take()
            if summary is None:
                return
            self.progress.training_s += summary.elapsed_s
            self.progress.scores.count(summary.num_items)
            generation, timing = self.lock.generation, self._clock.take()
            self.telling.write(self.assembly.make_step_record(generation, summary, timing))
            self.telling.judge(summary.step)
            self.telling.console.step(summary)
        blame.raise_if_over(self.progress.guard, self.assembly, summary.step)

    # ---- evaluations

    def evaluate(self, split: str) -> Evaluation:
        """Evaluate the current weights on `split`; save them if they are the best."""
        with self._clock.within(phases.EVALUATION):
            self.close_window()
            result = self._evaluate(split)
            step, counts = self.progress.step, split == self.assembly.spec.evaluate.first_split
            self.progress.scores.note(split, step)
            best = counts and self.progress.scores.add(step, result)
            event = result.as_event(self.lock.generation, step, best=best)
            names_split = not counts or len(self.assembly.spec.evaluate.splits) > 1
            epoch = self.assembly.feed.epoch_of(step)
            self.telling.log_evaluation(event, epoch, result, names_split=names_split)
            if best:
                self._commit(copied=True)
            if counts and (reason := self.progress.scores.reason_to_stop()):
                self.stops.stop(reason)
            self._meter.restart_clock()
            return result

    def _evaluate(self, split: str) -> Evaluation:
        step, stops = self.progress.step, self.stops
        try:
            with self._averaged_weights():
                tell = functools.partial(self._evaluating, split)
                notice = self.telling.of_evaluation(split, step)
                return self.assembly.evaluate(split, self.group, tell, notice)
        except (Exception, SystemExit) as error:
            if stops.is_leaving or isinstance(error, UnknownSplitError):
                raise
            # the state is that of the step before the evaluation
            if isinstance(error, SystemExit) and self.group.is_alone and stops.is_preempted:
                self.progress.scores.owed = split
                self._commit(last=True)
                self._wait_for_save()
                raise
            raise blame.as_run_error(error, f"evaluation after step {step}:") from error

    def _evaluating(self, split: str, done: int, total: int | None) -> None:
        """Print progress; exit after SIGTERM, since the scheduler kills the process soon."""
        if self.group.is_alone and self.stops.is_preempted:
            raise SystemExit(self.stops.exit_code)
        self.telling.console.evaluating(split, done, total)

    def _averaged_weights(self) -> Any:
        with self._clock.within(phases.CHECKPOINT):
            self.keeper.before_update()  # the weights are about to be swapped with the average
        average = self.assembly.engine.average
        return torch.no_grad() if average is None else average.swapped_in()

    # ---- checkpoints

    def save(self) -> None:
        """Save a checkpoint of this step now; return once it is on disk or has failed."""
        self._commit(asked=True)
        self._wait_for_save()

    def _wait_for_save(self) -> None:
        with self._clock.within(phases.CHECKPOINT):
            self.keeper.settle(self.on_save, wait=True)

    def _commit(self, **how: bool) -> None:
        """Save a checkpoint; a storage error ends the run only after `checkpoint.max_unsaved`."""
        if self.lock.is_lost():
            raise StorageError(self.lock.describe_loss(), hint="this attempt ends here")
        self.close_window()
        progress, step = self.progress, self.progress.step
        try:
            with self._clock.within(phases.CHECKPOINT):
                with self.keeper.write_alike():
                    self.ledger.sync()
                    self.telling.journal.sync()
                clock, score = progress.scores.clock(progress.training_s), progress.score()
                self.keeper.save(step, progress.state(), clock, score, self.on_save, **how)
        except StorageError as error:
            self.keeper.on_failed_save(self.telling, error, step)

    def on_save(self, saved: SaveResult) -> None:
        """Record the result of a save; raise its error if that is not a storage error."""
        self.keeper.report(self.telling, saved.step)
        if isinstance(saved.error, StorageError) and not self.lock.is_lost():
            self.keeper.on_failed_save(self.telling, saved.error, saved.step)
        elif saved.error is not None:
            raise saved.error
        elif saved.manifest is not None:
            self.telling.log_checkpoint(
                saved.step,
                saved.manifest.num_bytes,
                self.program,
                elapsed_s=saved.elapsed_s,
                waited_s=saved.waited_s,
            )

    def state_digests(self) -> dict[str, str]:
        """Return a SHA-256 (hex) per component of the state; equal for identical states."""
        self.close_window()
        return self.keeper.digests(self.progress.state())

    # ---- the end

    def save_last(self) -> None:
        """Save the state at the end of the run. Raises StorageError if it cannot be saved."""
        if self.progress.step:
            self._commit(last=True)
            self._wait_for_save()
            self.keeper.check_saved(self.progress.step)

    def end(self, error: BaseException | None) -> RunResult:
        """Write the Ended record, and return the result of the run.

        `error` is the error that ends the run; only without one is an error in writing raised.
        """
        self.keeper.abandon()
        step, total = self.progress.step, self.assembly.course.total_steps
        result = self.result
        result.outcome, result.cause, result.exit_code = self.stops.ending(error, step, total)
        is_interrupted = result.outcome == "interrupted"
        script.record(self.folder(), result.exit_code if is_interrupted else EXIT_OK)
        if self.lock.is_lost():
            return result  # the log belongs to a later attempt, or is gone
        try:
            if error is not None:
                # records the steps since the last record; `error` is the one to report
                with suppress(Exception):
                    self.close_window()
            self.telling.end(step)
            self._clock.take()
            result.summary = self.progress.scores.summary(self, self._clock.total())
            self.telling.journal.write(self.progress.scores.make_ended_record(self))
            self.telling.journal.close()
        except StorageError as problem:
            if error is None:
                raise
            self.telling.console.warn(f"the end of the run could not be written: {problem.message}")
        return result
