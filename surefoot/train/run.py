"""Run: the training loop as a generator that the user's `for` drives."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from surefoot.components import checkpoint
from surefoot.components.observe.meter import Meter
from surefoot.components.profiler.phases import clock as phases
from surefoot.components.stability.guard import Guard
from surefoot.contract.spec import RunSpec
from surefoot.contract.spec_file import Origin, as_spec
from surefoot.contract.state import StepReport
from surefoot.contract.task import check_not_importing
from surefoot.core.errors import EXIT_OK, InputError, RunFolderError, StorageError
from surefoot.core.process.forked import OwningProcess
from surefoot.train import environment, folder
from surefoot.train.evaluate import Evaluation
from surefoot.train.failure import blame
from surefoot.train.failure.ending import WHOLE, StopRequests
from surefoot.train.failure.script_exit import script
from surefoot.train.folder import RunFolderRequest, make_absolute
from surefoot.train.preflight.preparation import PreparedRun, prepare
from surefoot.train.record.dtypes import tell_dtypes
from surefoot.train.record.peak import make_step_function
from surefoot.train.record.profiling import Profiling
from surefoot.train.record.scores import Scores
from surefoot.train.record.telling import RunDamage, make_telling, open_console, open_records
from surefoot.train.resume import together
from surefoot.train.resume.keeper import CheckpointManager
from surefoot.train.resume.start import RunStart, Start, begin, check_can_restart, check_same_data


class Run:
    """Attempt at a run: `with Run(spec) as run:`, and inside `for report in run.steps(): ...`.

    Args:
        spec: Specification of the run: a RunSpec, a TOML file, a built-in task's name, or tables.
        task: Task object in place of the task that `[task] use` names.
        folder: Run folder; None for a new one in runs/.
        fresh: Train a new run in a new folder beside `folder`; nothing is deleted.
        accept_code_change: Resume although the task's code has changed.
        accept_data: Resume although the data differ from those trained on.
        quiet: Show no progress.
        start: Checkpoint of a different run, from which this run starts.

    Raises:
        InputError: Before anything is written.
        RunError: For a run that started and could not continue.
    """

    def __init__(
        self,
        spec: RunSpec | Origin | Mapping[str, Any] | str | Path,
        task: Any = None,
        *,
        folder: str | Path | None = None,
        fresh: bool = False,
        accept_code_change: bool = False,
        accept_data: bool = False,
        quiet: bool = False,
        start: Start | None = None,
    ) -> None:
        self.spec, self._start = as_spec(spec), start
        self._given_task, self._wanted = task, RunFolderRequest(folder)
        self._fresh, self._accept = fresh, accept_code_change
        self._accept_data, self._quiet = accept_data, quiet
        self._stops = StopRequests()
        self._is_open = self._is_taken = False
        self._meter = Meter()
        self.step = self.num_samples = 0
        self.training_s = self._before_s = 0.0
        self.cause = self.outcome = self._other_data = ""
        self.exit_code = EXIT_OK
        self.summary: dict[str, Any] = {}
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        check_not_importing()
        script.watch()
        self._owner = OwningProcess()
        self._opened.callback(environment.apply(self.spec))
        with ExitStack() as unless_begun:
            unless_begun.callback(self._opened.close)
            with blame.as_task_errors():
                self._begin()
            unless_begun.pop_all()
        return self

    def _begin(self) -> None:
        heard: list[str] = []  # messages on the connection of the ranks
        self.group = group = self._opened.enter_context(together.join_ranks(self.spec, heard))
        self._mesh = together.make_mesh(group, self.spec)
        made = group.settle(self._prepare)
        self.assembly.warnings.extend(heard)
        together.check_alike(group, self.assembly, made.program, self._wanted())
        spec = environment.as_run(self.spec) if self._start is None else None
        with together.acquire_run_folder(group, made.choose, spec) as (chosen, self._lock):
            self._opened.callback(self._lock.release)
            self._open(chosen, made)
        asked = self._keeper.ask, self._telling.console.say, lambda: self.step
        self._stops.listen(self._opened, *asked)
        self._is_open = True
        self._clock.switch(phases.OTHER)

    def _prepare(self) -> PreparedRun:
        """Build and check the run on this rank; write nothing."""
        made = prepare(
            self.spec,
            self._given_task,
            self._wanted,
            self._mesh,
            fresh=self._fresh,
            accept_code_change=self._accept,
            is_fork=self._start is not None,
        )
        self.assembly, self.spec = made.assembly, made.assembly.spec
        self.model, self.task = made.assembly.model, made.task
        return made

    def _open(self, chosen: folder.Chosen, made: PreparedRun) -> None:
        """Open the files of the run, restore a checkpoint if any, and write the Started record."""
        self._folder, root = make_absolute(chosen.folder), chosen.folder.absolute()
        self.generation, self._stops.outcome = self._lock.generation, chosen.done
        self._scores = Scores(self.assembly)
        table, total = self.spec.stability, self.assembly.course.total_steps
        self._guard = Guard(table, min_scale=self.spec.precision.min_scale, total_steps=total)
        together.clear_drafts(self.group, self.folder)
        begun = None if self._start is None else self._begin_with(self._start, chosen)
        self._keeper = CheckpointManager(
            root, self._lock, self.assembly, None if begun is None else begun.parent, self.group
        )
        troubles = self._resume(chosen) if begun is None else []
        first = [] if begun is None else self._commit_first(begun)
        self._home = home = together.home_of(self.group, root)
        journal, tensorboard = open_records(self, home, chosen)
        self._opened.callback(journal.abandon)
        self._ledger = together.open_ledger(self.group, root, self.assembly, self.generation)
        self._opened.callback(self._ledger.close)
        self._ends_window = self.assembly.course.rhythm(self.spec.observe.every)
        self._clock = self.assembly.engine.steps.clock
        self._opened.callback(self._clock.listen_to_collections())
        self.started_s = time.perf_counter()
        self._clock.start(phases.LOGGING)
        since = self.step if self._is_taken else None
        where = chosen.describe_start(since) if begun is None else begun.notes
        said = (*chosen.notes, *where, *self.assembly.said)
        warnings = (*self._keeper.disk_note(), *self.assembly.warnings)
        told = environment.as_run(self.spec), made.program, (*said, *warnings, *made.notes)
        journal.begin(
            self.assembly.make_started_record(
                self.generation, *told, first_step=self.step + 1, parent=self._keeper.parent or {}
            )
        )
        self._opened.callback(together.release_other_ranks(self.group, self.assembly))
        console = open_console(self, quiet=self._quiet)
        self._opened.callback(console.close)
        self._telling = make_telling(self, journal, tensorboard, console, self._guard)
        self._opened.callback(self._telling.subscribe(self.assembly.engine.steps.reader.loader))
        self.profiling = Profiling(home, self.assembly, console.say)
        self._opened.callback(self.profiling.close)
        damage = RunDamage(
            log=made.damaged,
            commits=troubles,
            lost_commits=self._keeper.lost_commits,
            num_lost_rows=self._ledger.count_lost(self.step),
            other_data=self._other_data,
        )
        self._telling.tell_damage(damage, self.step)
        self._telling.begin(
            (*said, f"run folder {self.folder}"), warnings if self.group.is_first else ()
        )
        for saved in first:
            self._on_save(saved)

    def _resume(self, chosen: folder.Chosen) -> list[str]:
        """Resume from the newest undamaged checkpoint, if any; return messages on damage."""
        if not chosen.is_again and self.spec.checkpoint.store is None:
            return []
        if chosen.is_again:
            check_same_data(chosen, self.assembly.feed.source.digest)
        saved, step, troubles = self._keeper.resume()
        if saved is None:
            check_can_restart(chosen)
        else:
            self._take(step, saved)
        return troubles

    def _take(self, step: int, saved: Mapping[str, Any]) -> None:
        """Restore counters, scores, checks and loader from `saved`, the state after `step`."""
        with checkpoint.as_run_folder_errors(f"the state after step {step:,}"):
            self.step = step
            self.num_samples = int(saved["num_samples"])
            self.training_s = float(saved["clock"]["training_s"])
            self._scores.restore(saved["scores"], saved["clock"])
            self._guard.restore(saved["guard"])
            self.assembly.engine.steps.reader.loader.restore(saved)
        self._other_data = together.find_data(
            self.assembly, step + 1, accept=self._accept_data or self._start is not None
        )
        self._before_s = self.training_s
        self._is_taken = True

    def _begin_with(self, start: Start, chosen: folder.Chosen) -> RunStart:
        """Load `start`. Raises RunFolderError if it does not fit or the folder holds a run."""
        if chosen.is_again:
            raise RunFolderError(
                f"{self.folder} already holds a run, and stays unchanged",
                hint=(
                    "resume an unfinished run without start=: surefoot resume "
                    f"{str(self.folder)!r}; else start in a new folder"
                ),
            )
        begun = begin(start, self.assembly)
        if begun.saved is not None:
            self._take(begun.step, begun.saved)
            self._scores.begin_fork(self.num_samples, self.training_s)
            if self.group.is_first:
                together.begin_fork(start.run, self.folder, self.assembly.feed, begun.step)
        return begun

    def _commit_first(self, begun: RunStart) -> list[checkpoint.SaveResult]:
        """Save the initial state before the first record, so that a killed fork can resume."""
        clock, done = self._scores.clock(self.training_s), list[checkpoint.SaveResult]()
        self._keeper.saved_step = -1
        if self.group.is_first:
            folder.announce_fork(self.folder, environment.as_run(self.spec))
        more, score = self._counters(), self._scores.score_of(begun.step)
        self._keeper.save(begun.step, more, clock, score, done.append, last=True)
        for problem in filter(None, (each.error for each in done)):
            raise problem
        return done

    def _check_begun(self) -> None:
        if not self._is_open:
            raise InputError(
                "this run is not open",
                hint="use the run inside its block: with Run(spec) as run: ...",
            )
        self._owner.check("this run")

    def steps(self) -> Iterator[StepReport]:
        """Take the steps of the run and yield a StepReport after each, until its end or a stop."""
        self._check_begun()
        reader, total = self.assembly.engine.steps.reader, self.assembly.course.total_steps
        ends_window = self._ends_window
        if (owed := self._scores.take_owed()) is not None:
            self._keeper.saved_step = 0  # so that the step is saved again, with it
            self.evaluate(owed)
        self._first_step = self.step + 1
        self._meter.restart_clock()
        take_step = make_step_function(self.assembly, self._telling, self._home)
        self._clock.begin_steps()
        while not self._is_to_end(total):
            number = self.step + 1
            try:
                report = take_step(number)
            except (Exception, SystemExit) as error:
                if self._stops.is_leaving:
                    raise
                raise blame.as_run_error(error, f"{self.group.place}step {number}:") from error
            self.step = number
            self._ledger.add(number, reader.consumed)
            self.num_samples += report.num_samples
            self._meter.add(report)
            self._guard.watch(report)
            if ends_window(number) or number == 1 or report.was_applied is False:
                self._close_window()
            if number == self._first_step:
                tell_dtypes(self.assembly, self._telling, number)
            self.profiling.step_done(report)
            yield report
            # a process that the loop body has forked may also return to this line
            if not (self._is_open and self._owner.is_here):
                self._check_begun()
            if self._keeper.is_due(number):
                # after the loop body: its evaluation of this step is saved with the weights
                self._commit()
            else:
                self._keeper.settle(self._on_save)
        self._close_window()
        self._stops.outcome = self._stops.outcome or WHOLE

    def _is_to_end(self, total: int | None) -> bool:
        """Return whether the run ends now; the result is the same on all ranks."""
        is_late = False
        if total is None:
            spent_s = self._before_s + time.perf_counter() - self.started_s
            is_late = spent_s >= self.assembly.course.length.value
        with nullcontext() if self.group.is_alone else self._clock.within(phases.COMMUNICATION):
            stop, code, is_late = together.is_over(
                self.group, self._stops.outcome, self._stops.exit_code, is_late, self._keeper
            )
        if stop is not None:  # else a signal that arrived in the meantime would be forgotten
            self._stops.outcome, self._stops.exit_code = stop, code
        return stop is not None or is_late or (total is not None and self.step >= total)

    def _close_window(self) -> None:
        with self._clock.within(phases.LOGGING):
            summary = self._meter.take()
            if summary is None:
                return
            self.training_s += summary.elapsed_s
            self._scores.count(summary.num_items)
            self._telling.write(
                self.assembly.make_step_record(self.generation, summary, self._clock.take())
            )
            self._telling.judge(summary.step)
            self._telling.console.step(summary)
        blame.raise_if_over(self._guard, self.assembly, summary.step)

    @property
    def folder(self) -> Path:
        """Path of the run folder as given; absolute if the working folder has changed since."""
        return self._folder()

    @property
    def is_stopping(self) -> str | None:
        """Outcome "stopped" or "interrupted" if the run ends after this step, else None."""
        return self._stops.outcome[0] if self._stops.outcome is not None else None

    @property
    def last_evaluated(self) -> int:
        """Step whose weights were evaluated last; 0 if there was no evaluation."""
        return self._scores.last_step

    @property
    def num_skipped(self) -> int:
        """Number of skipped steps: gradients were non-finite, or the loss counted no item."""
        return self._guard.num_skipped

    def stop(self, reason: str) -> None:
        """End the run after this step; the Ended record holds `reason` of the first call."""
        self._stops.outcome = self._stops.outcome or ("stopped", reason)

    @property
    def evaluation_due(self) -> bool:
        """True if an evaluation is due after this step, by the spec's interval or at the end."""
        return self._scores.is_due(self.step) or self.step == self.assembly.course.total_steps

    def evaluate(self, split: str | None = None) -> Evaluation:
        """Evaluate the current weights on `split` (default: the spec's); save them if best."""
        self._check_begun()
        with self._clock.within(phases.EVALUATION):
            return self._evaluate(split or self.spec.evaluate.split)

    def _evaluate(self, name: str) -> Evaluation:
        self._close_window()
        try:
            with self._averaged_weights():
                tell = functools.partial(self._evaluating, name)
                notice = self._telling.of_evaluation(name, self.step)
                result = self.assembly.evaluate(name, self.group, tell, notice)
        except (Exception, SystemExit) as error:
            if self._stops.is_leaving:
                raise
            # the state is that of the step before the evaluation
            if isinstance(error, SystemExit) and self.group.is_alone and self._stops.is_preempted:
                self._scores.owed = name
                self._commit(last=True)
                self._wait_for_save()
                raise
            raise blame.as_run_error(error, f"evaluation after step {self.step}:") from error
        counts = name == self.spec.evaluate.split
        best = counts and self._scores.add(self.step, result)
        event = result.as_event(self.generation, self.step, best=best)
        self._telling.log_evaluation(event, self.assembly.feed.epoch_of(self.step), result)
        if best:
            self._commit(copied=True)
        if counts and (reason := self._scores.reason_to_stop()):
            self.stop(reason)
        self._meter.restart_clock()
        return result

    def _evaluating(self, split: str, done: int, total: int | None) -> None:
        """Print progress; exit after SIGTERM, since the scheduler kills the process soon."""
        if self.group.is_alone and self._stops.is_preempted:
            raise SystemExit(self._stops.exit_code)
        self._telling.console.evaluating(split, done, total)

    def _averaged_weights(self) -> Any:
        with self._clock.within(phases.CHECKPOINT):
            self._keeper.before_update()  # the weights are about to be swapped with the average
        average = self.assembly.engine.average
        return torch.no_grad() if average is None else average.swapped_in()

    def save(self) -> None:
        """Save a checkpoint of this step now; return once it is on disk or has failed."""
        self._check_begun()
        self._commit(asked=True)
        self._wait_for_save()

    def _wait_for_save(self) -> None:
        """Wait until the save in the background is on disk or has failed."""
        with self._clock.within(phases.CHECKPOINT):
            self._keeper.settle(self._on_save, wait=True)

    def _commit(self, **how: bool) -> None:
        """Save a checkpoint; a storage error ends the run only after `checkpoint.max_unsaved`."""
        if self._lock.is_lost():
            raise StorageError(self._lock.describe_loss(), hint="this attempt ends here")
        self._close_window()
        try:
            with self._clock.within(phases.CHECKPOINT):
                with self._keeper.write_alike():
                    self._ledger.sync()
                    self._telling.journal.sync()
                clock, score = self._scores.clock(self.training_s), self._scores.score_of(self.step)
                self._keeper.save(self.step, self._counters(), clock, score, self._on_save, **how)
        except StorageError as error:
            self._keeper.on_failed_save(self._telling, error, self.step)

    def state_digests(self) -> dict[str, str]:
        """Return a SHA-256 (hex) per component of the state; equal for identical states."""
        self._check_begun()
        self._close_window()
        return self._keeper.digests(self._counters())

    def _counters(self) -> dict[str, Any]:
        """Return the counters and loader state that a checkpoint stores beside the model."""
        return {
            "num_samples": self.num_samples,
            "scores": self._scores.state(),
            "guard": self._guard.state(),
            **together.state_of(self.assembly.engine.steps.reader.loader),
        }

    def _on_save(self, saved: checkpoint.SaveResult) -> None:
        """Record the result of a save; raise its error if that is not a storage error."""
        self._keeper.report(self._telling, saved.step)
        if isinstance(saved.error, StorageError) and not self._lock.is_lost():
            self._keeper.on_failed_save(self._telling, saved.error, saved.step)
        elif saved.error is not None:
            raise saved.error
        elif saved.manifest is not None:
            self._telling.log_checkpoint(saved, saved.manifest.num_bytes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._owner.is_here:
            return  # only the process that opened the run ends it
        self._clock.switch(phases.OTHER)  # an error may have interrupted any phase
        try:
            if error is None and self.step:
                self._commit(last=True)
                self._wait_for_save()
                self._keeper.check_saved(self.step)
        except BaseException as problem:
            error = problem
            raise
        finally:
            self._is_open, self._stops.is_leaving = False, True
            with self._opened:
                self._keeper.abandon()
                self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Write the Ended record; an error in writing it is raised only if `error` is None."""
        ending = self._stops.ending(error, self.step, self.assembly.course.total_steps)
        self.outcome, self.cause, self.exit_code = ending
        script.record(self.folder, self.exit_code if self.outcome == "interrupted" else EXIT_OK)
        if self._lock.is_lost():
            return  # the log belongs to a later attempt, or is gone
        try:
            if error is not None:
                # records the steps since the last record; `error` is the one to report
                with suppress(Exception):
                    self._close_window()
            self._telling.end(self.step)
            self._clock.take()
            self.summary = self._scores.summary(self, self._clock.total())
            self._telling.journal.write(self._scores.make_ended_record(self))
            self._telling.journal.close()
        except StorageError as problem:
            if error is None:
                raise
            self._telling.console.warn(
                f"the end of the run could not be written: {problem.message}"
            )


def drive(run: Run) -> None:
    """Take all steps of an open run; evaluate at the interval of the spec and at the end."""
    for _ in run.steps():
        if run.evaluation_due:
            run.evaluate()
    if run.step > run.last_evaluated and run.is_stopping != "interrupted":
        run.evaluate()
