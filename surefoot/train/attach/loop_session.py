"""Session of an attached loop: its progress, and the record of its steps and checkpoints."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from surefoot.components.data import in_place
from surefoot.components.data.feed import size_of
from surefoot.components.data.sources.watched import ObservedLoader
from surefoot.components.observe.console import Console
from surefoot.components.observe.journal import Journal, NoJournal
from surefoot.components.observe.memory_use import peak_resident_bytes
from surefoot.components.observe.meter import Meter, make_step_record
from surefoot.components.profiler.phases.clock import CHECKPOINT, DATA, LOGGING, OTHER, PhaseClock
from surefoot.components.stability.guard import Guard, GuardFault
from surefoot.contract import events
from surefoot.contract.runlock import RunLock
from surefoot.contract.state import StepReport, learning_rate_of
from surefoot.core.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK, InputError, StorageError
from surefoot.core.process.forked import OwningProcess
from surefoot.runtime.comm.group import Group
from surefoot.train import environment
from surefoot.train.attach.arguments import can_save_position
from surefoot.train.attach.loop_keeper import LoopKeeper
from surefoot.train.attach.loop_progress import LoopProgress
from surefoot.train.attach.loop_ranks import RankedLedger, prepare_save
from surefoot.train.attach.read_ahead import PendingBatches, ReadBatch
from surefoot.train.failure import blame
from surefoot.train.record.noticed.unheld import UnheldObjects
from surefoot.train.record.scores import timing_rows
from surefoot.train.record.telling import RunLog
from surefoot.train.resume.program import Program

# fields of the Ended record that its summary has too
IN_SUMMARY = (
    "step",
    "outcome",
    "cause",
    "elapsed_s",
    "num_samples",
    "samples_per_s",
    "peak_bytes",
)
NO_BATCHES = (
    "this step read no batch from batches(): no checkpoint is saved between two steps, only by "
    "save() and close(), and a restart does not resume in the middle of an epoch; iterate over "
    "run.batches() instead of the data"
)


@final
class LoopLog(RunLog):
    """Log and console of a loop; an error in writing ends the recording, never the loop.

    `opened` holds what `close` closes.
    """

    def __init__(
        self,
        journal: Journal | NoJournal,
        console: Console,
        clock: PhaseClock,
        generation: int,
        group: Group,
        opened: ExitStack,
    ) -> None:
        super().__init__(journal, console, clock, generation)
        self.owner, self._group, self._opened = OwningProcess(), group, opened
        self._is_over = self._was_ended = self._has_told = False

    def is_over(self) -> bool:
        """Return whether recording has ended or this process is a fork of the one that records."""
        if not self._is_over and not self.owner.is_here:
            self._is_over = True
            self.console.warn(
                f"{self.owner.describe('this loop')}: this process neither records nor saves it"
            )
        return self._is_over

    def is_over_for(self, call: str) -> bool:
        """Return `is_over`; if the loop was ended before, warn once that `call` has no effect."""
        if self._was_ended and not self._has_told and self._group.is_first:
            self._has_told = True
            self.console.warn(f"{call} after the end of the loop: no step is recorded or saved")
        return self.is_over()

    def _record(self, event: events.Event) -> None:
        if self.is_over():
            return
        try:
            super()._record(event)
        except StorageError as error:
            self._give_up(error)

    def _give_up(self, error: StorageError) -> None:
        self.console.warn(f"{self._group.place}{error.message}; the loop continues without records")
        self.journal.abandon()
        self.journal = NoJournal()
        if self._group.is_alone:  # else the other ranks wait for this one in every save
            self.close()

    def when_closed(self, call: Callable[[], object]) -> None:
        self._opened.callback(call)

    def finish(self, sync: Callable[[], None]) -> None:
        """Write what is left after the last record, by `sync` too, and close."""
        if not self._is_over:
            try:
                sync()
                self.journal.close()
            except StorageError as error:
                self._give_up(error)
        self._was_ended = True
        self.close()

    def close(self) -> None:
        """Close the files of the loop and release its folder; nothing more is recorded."""
        self._is_over = True
        self._opened.close()


@final
@dataclass(kw_only=True, eq=False)
class LoopSession:
    """Attempt at an attached loop whose folder is open, with all that records and saves it.

    Args:
        optimizers: Optimizers of the loop.
        program: Code of the loop.
        given: Settings that the script has given, for the next attempt to compare.
        every: Number of steps that one record summarizes.
        group: The ranks.
        folder: Function that returns the path of the run folder, as `make_absolute` does.
        lock: Lock of the run folder.
        progress: Counters.
        keeper: Manager of the checkpoints.
        ledger: Ledger of the batches that the steps read.
        telling: Log and console.
        watched: The data.
        unheld: Check for objects of the loop that no checkpoint holds.
        clock: Clock of the phases of a step.
        device: Device of the model.
        started_s: Start of the attempt in seconds, by `time.perf_counter`.
    """

    optimizers: Sequence[Any]
    program: Program
    given: Mapping[str, str]
    every: int
    group: Group
    folder: Callable[[], Path]
    lock: RunLock
    progress: LoopProgress
    keeper: LoopKeeper
    ledger: RankedLedger
    telling: LoopLog
    watched: ObservedLoader
    unheld: UnheldObjects
    clock: PhaseClock
    device: torch.device
    started_s: float

    def __post_init__(self) -> None:
        self._meter, self._pending = Meter(), PendingBatches()
        self._lent = in_place.InPlaceWriteCheck(self.watched.data)
        self._old_error = getattr(sys, "last_value", None)
        self._saved_step, self._waiting_s = self.progress.step, 0.0
        self.first_pass, self.first_batch = self.keeper.first_pass, self.keeper.first_batch
        self._has_stepped = self._was_left = False  # an epoch was left, as by `break`
        self._is_inside = False  # an epoch
        # whether the last save is of the end of an epoch, before the code that follows its batches
        self._is_before_end = False
        lengths = set(self.group.exchange(str(self.progress.length)))
        self._is_even = len(lengths) == 1  # all ranks read as many batches

    # ---- batches and steps

    def batches(self, ahead: int | None = None) -> Iterator[Any]:
        """Yield the batches of one epoch; `ahead` as in `AttachedLoop.batches`."""
        batches = self.begin_pass(ahead)
        while True:
            self.between_steps()
            asked_ns = self.clock.switch(DATA)
            try:
                batch = next(batches)
            except StopIteration:
                break
            finally:
                got_ns = self.clock.switch(OTHER)
            self.on_batch(batch, (got_ns - asked_ns) / 1e9)
            try:
                yield batch
            except GeneratorExit:
                self._was_left = True
                raise
        self.end_pass()

    def begin_pass(self, ahead: int | None) -> Iterator[Any]:
        """Begin an epoch, and return an iterator over its batches."""
        self.telling.is_over_for("batches()")
        self._end_epoch(is_over=self._pending.is_ending)
        self._pending.begin_epoch(ahead)
        self._is_inside, self._was_left, self.first_batch = True, False, 0
        self.unheld.begin()
        # time between two epochs does not count for the throughput
        self._meter.restart_clock()
        self.clock.begin_steps()
        with self.clock.within(DATA):
            batches = self.keeper.begin_pass()
        if (found := self.keeper.difference) is not None:
            self.telling.warn(f"{self.group.place}{found.what}; {found.hint}")
            step, action = self.progress.step, "the loop resumes with these data"
            fault = GuardFault(step, "other-data", action, found.what)
            self.telling.write(environment.fault(self.telling.generation, fault))
        return batches

    def between_steps(self) -> None:
        """Save if due, and warn of batches changed in place, before the next batch is read."""
        step = self.progress.step
        if self._lent.was_data_changed():
            what = in_place.describe("the loop")
            self.telling.fault(GuardFault(step, "changed-data", in_place.HINT, what))
        if self._is_save_due():
            self.commit()
        self.keeper.before_read(self._pending.ahead)

    def _is_save_due(self) -> bool:
        """Return whether a regular save is due between two steps.

        It waits after the last batch of an epoch until the next epoch: a loop that resumed there
        would run the code that follows its batches without a batch.
        """
        if not self._pending.is_between_steps(self.keeper.pass_number):
            return False
        step, length = self.progress.step, self.progress.length
        num_trained = self.keeper.position - self._pending.num_in_hand
        if self._is_even and length is not None and num_trained >= length:
            return False
        return self._is_before_end or (step > self._saved_step and self.keeper.is_due(step))

    def on_batch(self, batch: Any, waited_s: float) -> None:
        """Count a batch that the loop receives after `waited_s` seconds."""
        self._waiting_s += waited_s
        self._lent.lend(batch)
        self.progress.num_batches += 1
        read = self.keeper.take_next(batch)
        num_samples = self.watched.num_drawn or size_of(batch) or 0
        self._pending.add(ReadBatch(*read, num_samples))

    def end_pass(self) -> None:
        """Record that the loop has received all batches of the epoch."""
        self._is_before_end = self._is_even and self._saved_step == self.progress.step > 0
        self._is_inside = False
        self._pending.end_epoch()
        self._end_epoch(is_over=self._pending.is_last_step_done)
        self.close_window()

    def _end_epoch(self, *, is_over: bool) -> None:
        """Count the epoch if `is_over`, after the steps on batches that were read ahead."""
        if is_over and self.keeper.end_pass():
            self.progress.num_passes += 1

    def step_done(
        self, loss: Tensor | None, num_samples: int | None = None, num_batches: int = 0
    ) -> None:
        """Record an optimizer step; `num_samples` is that of `AttachedLoop.step_done`.

        `loss` is a scalar; None if it is not known yet, and given to `close_window` after several
        steps. `num_batches` were read by the caller, not from `batches`.
        """
        if self.telling.is_over_for("step_done()"):
            return
        taken = self._pending.take()
        is_unread = not (self._has_stepped or taken or num_batches)
        if is_unread and self.keeper.saves_regularly and self.group.is_first:
            self.telling.warn(NO_BATCHES)
        count = sum(batch.num_samples for batch in taken) if num_samples is None else num_samples
        weight = count or 1  # without batches(), each step has weight 1 in the mean
        progress, self._has_stepped = self.progress, True
        step = progress.step = progress.step + 1
        progress.num_batches += num_batches
        self.clock.end_step(step)
        self.ledger.add_step(step, self.keeper.pass_number, [each[:3] for each in taken])
        self._end_epoch(is_over=self._pending.is_last_step_done)
        if (fault := self._pending.find_fault(step, len(taken))) is not None:
            self.telling.fault(fault)
        progress.num_samples += count
        report = StepReport(
            step=step,
            epoch=progress.epoch,
            num_samples=count,
            learning_rate=learning_rate_of(self.optimizers[0].param_groups[0]),
            totals={} if loss is None else {"loss": (loss * weight, weight, 1.0)},
            norm=None,
            was_applied=True,
            waiting_s=self._waiting_s,
        )
        self._meter.add(report)
        self._waiting_s = 0.0
        if loss is not None and (step % self.every == 0 or step == 1):
            self.close_window()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a `with` block as phase `name`. Raises InputError for an unknown phase."""
        name = events.RENAMED_PHASES.get(name, name)
        if name not in events.PHASES:
            raise InputError(
                f"there is no phase {name!r}", hint=f"use one of {', '.join(events.PHASES)}"
            )
        return self.clock.within(events.PHASES.index(name))

    def close_window(self, loss: float | None = None) -> None:
        """Record the steps since the last record; `loss` replaces the mean of their losses."""
        with self.clock.within(LOGGING):
            summary = None if self.telling.is_over() else self._meter.take()
            if summary is None:
                return
            if loss is not None:
                summary = replace(summary, loss=loss, terms={"loss": loss})
            for line in self.unheld.find_new() if self.group.is_first else ():
                self.telling.console.warn(line)
            timing = self.clock.take()
            self.progress.training_s += summary.elapsed_s
            self.progress.loss = summary.loss
            groups = {"optimizer": [row for each in self.optimizers for row in each.param_groups]}
            self.telling.write(
                make_step_record(
                    summary, timing, groups, generation=self.telling.generation, device=self.device
                )
            )

    # ---- checkpoints

    def save(self) -> None:
        """Save a checkpoint as the user asks; an epoch that was left by `break` has ended."""
        self.telling.is_over_for("save()")
        if self._was_left and not can_save_position(self.watched.data):
            self._pending.leave_epoch()
            self.keeper.end_pass()
        self.commit()

    def commit(self) -> None:
        """Save a checkpoint; a storage error cancels this save and never stops the loop."""
        step, warn = self.progress.step, self.telling.console.warn
        if self.telling.is_over():
            return
        self.close_window()
        counters = {**self.progress.state(self._pending.num_in_hand), "given": self.given}
        try:
            with self.clock.within(CHECKPOINT):
                prepare_save(self.group, step, self.ledger, self.lock, self.telling.journal.sync)
                made, elapsed_s = self.keeper.save(step, counters, self._pending)
        except StorageError as error:
            if self.group.is_first:  # which receives the errors of all ranks
                warn(f"{error.message}; the loop continues")
            return
        finally:
            if deleted := self.keeper.take_deleted():
                warn(
                    f"the disk was full: the checkpoint of {deleted} was deleted "
                    "earlier than its retention says; the loop continues"
                )
        self._saved_step, self._is_before_end = step, False
        for line in (*self.keeper.take_unsaved(), *self.unheld.find_since_attach()):
            warn(line)
        self.telling.log_checkpoint(
            step, made.num_bytes, self.program, elapsed_s=elapsed_s, waited_s=elapsed_s
        )
        if (slow := self.keeper.take_slow()) is not None and self.group.is_first:
            self.telling.fault(Guard.slow_save(slow.step, slow.words, "save="))

    # ---- the end

    def end_at_exit(self) -> None:
        """End the recording with the process if it has not ended before."""
        atexit.register(self.end_with_process)
        self.telling.when_closed(lambda: atexit.unregister(self.end_with_process))

    def finish(self) -> None:
        """Save a checkpoint, and record that the loop has finished."""
        # the loop may have changed something since its last save
        if self._has_stepped and not self.telling.is_over():
            self.save()
        self.end("finished", f"the loop ended after step {self.progress.step}")

    def leave(self, error: BaseException | None) -> None:
        """End the recording with the end of a `with` block, in the process that called `attach`."""
        if not self.telling.owner.is_here:
            return
        if error is None:
            if self._has_stepped:
                self.commit()
            self.end()
        else:
            self.end_by(error)

    def end_by(self, error: BaseException) -> None:
        """End the recording with the outcome that belongs to `error`, which ended the loop."""
        step = self.progress.step
        if isinstance(error, KeyboardInterrupt):
            self.end("interrupted", f"interrupted by Ctrl-C after step {step}", EXIT_INTERRUPTED)
            return
        if not isinstance(error, Exception):
            code = blame.find_exit_code(error) if isinstance(error, SystemExit) else EXIT_INTERNAL
            cause = f"{blame.describe(error)} after step {step}"
            self.end("failed" if code else "stopped", cause, code)
            return
        is_placed = str(error).startswith(f"step {step}: ")
        made = blame.as_run_error(error, "" if is_placed else f"after step {step}:")
        self.end("failed", made.message, made.exit_code)

    def end_with_process(self) -> None:
        """End the recording at process exit: by a new uncaught exception, else as "stopped"."""
        error = getattr(sys, "last_value", None)
        if error is None or error is self._old_error:
            self.end("stopped")
        else:
            self.end_by(error)

    def end(self, outcome: str = "", cause: str = "", exit_code: int = EXIT_OK) -> None:
        """Write the Ended record, once; the default outcome is "finished" after whole epochs."""
        if not self.telling.owner.is_here or self.telling.is_over():
            return
        self.close_window()
        if not outcome:
            count = self.progress.num_passes
            is_whole = count > 0 and not self._is_inside
            outcome = "finished" if is_whole else "stopped"
            passes = "1 pass" if count == 1 else f"{count} passes"
            cause = f"{passes} over the data" if is_whole else ""
        cause = cause or f"the loop exited after step {self.progress.step}"
        if not self.lock.is_lost():
            self.telling.write(self._make_ended_record(outcome, cause, exit_code))
        self.telling.finish(self.ledger.sync)

    def _make_ended_record(self, outcome: str, cause: str, exit_code: int) -> events.Ended:
        self.clock.take()
        progress = self.progress
        num_timed, training_s = progress.num_samples - progress.num_untimed, progress.training_s
        summary: dict[str, Any] = {
            "folder": str(self.folder()),
            "step": progress.step,
            "epochs": progress.epoch,
            "score": "loss",
            "value": progress.loss,
            "unit": "",
            "better": "lower",
            "best_value": None,
            "best_step": None,
            "loss": progress.loss,
            "num_samples": progress.num_samples,
            "elapsed_s": time.perf_counter() - self.started_s,
            "training_s": training_s,
            "samples_per_s": num_timed / training_s if training_s > 0 else None,
            "peak_bytes": peak_resident_bytes(),
            "num_skipped": 0,
            "cause": cause,
            "outcome": outcome,
            **timing_rows(self.clock.total()),
        }
        return events.Ended(
            generation=self.telling.generation,
            time_s=time.time(),
            exit_code=exit_code,
            summary=summary,
            **{name: summary[name] for name in IN_SUMMARY},
        )
