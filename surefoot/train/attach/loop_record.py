"""The record of an attached loop: its counters, its events, its ledger and its checkpoints."""

from __future__ import annotations

import atexit
import functools
import hashlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

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
from surefoot.contract.run_folder.attached import SPEC_ID
from surefoot.contract.state import StepReport, learning_rate_of
from surefoot.core.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK, StorageError
from surefoot.core.process.forked import OwningProcess
from surefoot.runtime.comm.group import Group
from surefoot.train import environment
from surefoot.train.attach import loop_ranks
from surefoot.train.attach.arguments import (
    as_loss,
    describe_changes,
    find_guarantee,
    find_script,
    given_settings,
    length_of,
)
from surefoot.train.attach.loop_keeper import LoopKeeper
from surefoot.train.attach.loop_ranks import RankedLedger, begin_journal, describe, prepare_save
from surefoot.train.attach.read_ahead import PendingBatches, ReadBatch
from surefoot.train.failure import blame
from surefoot.train.record.noticed.unheld import UnheldObjects
from surefoot.train.record.scores import timing_rows
from surefoot.train.resume.program import Program
from surefoot.train.session import folder


@final
class LoopRecord:
    """Counters and files of an attached loop; it ends when its `AttachedLoop` is deleted."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        optimizers: list[Any],
        data: Iterable[Any],
        wanted: Path | None,
        every: int,
        save: str | None,
        group: Group,
        noticed: tuple[UnheldObjects, Sequence[str], tuple[str, ...]],
    ) -> None:
        self._unheld, reported, notes_on_resume = noticed
        model: nn.Module = objects["model"]
        self._optimizers, self._every = optimizers, max(1, every)
        self._data, self._group = data, group
        self._length = length_of(data)
        self._console = Console(total_steps=None, unit="samples", quiet=True)
        self._meter = Meter()
        self.owner, self._old_error = OwningProcess(), getattr(sys, "last_value", None)
        self._loss: float | None = None
        self._journal: Journal | NoJournal
        self._waiting_s = self._training_s = 0.0
        self._num_batches = self._num_passes = self.first_batch = 0
        self._watched = ObservedLoader(data)
        self._pending = PendingBatches()
        self._lent = in_place.InPlaceWriteCheck(data)
        self._is_inside = self._is_over = False
        self.step = self.num_samples = self.first_pass = self._saved_step = self._num_untimed = 0
        self._device = next(
            (parameter.device for parameter in model.parameters()), torch.device("cpu")
        )
        self.clock = PhaseClock(self._device)
        self.started_s = time.perf_counter()
        self.clock.start(LOGGING)
        name = type(model).__name__.lower()
        program = Program.of(find_script(), model)
        self._given = given_settings(objects, data)
        choice = functools.partial(
            folder.choose,
            folder.RunFolderRequest(wanted),
            SPEC_ID,
            name,
            program,
            fresh=False,
            accept_code_change=True,
            closed_by=(),
        )
        with loop_ranks.acquire_folder(group, choice) as (chosen, self._lock):
            self._at, self._root = folder.make_absolute(chosen.folder), chosen.folder.absolute()
            self.generation = self._lock.generation
            self._keeper = LoopKeeper(self._root, self._lock, objects, self._watched, save, group)
            notes = (
                *chosen.notes,
                *(self._resume(notes_on_resume) if chosen.is_again else ()),
                *reported,
            )
            self._ledger = group.settle(
                lambda: RankedLedger(group, self._root, self._watched.promise, self.generation)
            )
            self._journal = begin_journal(
                group,
                self._root,
                lambda: self._make_started_record(model, name, program, data, notes),
            )
        for note in notes if group.is_first else ():
            self._console.warn(note)
        lost = self._keeper.lost_commits
        for fault in (
            *(Guard.damaged_log(self.step, line) for line in chosen.damaged),
            *([Guard.lost_commit(self.step, lost)] if lost else []),
            *self._keeper.find_read_ahead(self.step),
        ):
            self._report(fault)
        self._stop_listening = self.clock.listen_to_collections()
        self.clock.switch(OTHER)

    @property
    def folder(self) -> Path:
        return self._at()

    def _resume(self, notes: tuple[str, ...]) -> tuple[str, ...]:
        """Resume from the newest checkpoint; return the messages for the user."""
        loop, troubles = self._keeper.resume()
        if loop is None:
            return ("no checkpoint was found: the loop starts from step 0",)
        self.step = self._saved_step = int(loop["step"])
        self.num_samples, self._num_batches = int(loop["num_samples"]), int(loop["num_batches"])
        self.first_pass, self._num_passes = self._keeper.first_pass, int(loop["num_passes"])
        self.first_batch = self._keeper.first_batch
        changed = describe_changes(loop.get("given", {}), self._given, self.folder)
        self._training_s = float(loop.get("training_s", 0.0))
        # an older version did not save the time
        self._num_untimed = 0 if "training_s" in loop else self.num_samples
        set_aside = (f"a damaged checkpoint was set aside: {trouble}" for trouble in troubles)
        return (
            *set_aside,
            f"resuming after step {self.step:,}, with the saved learning rates and settings",
            *self._keeper.describe_position(),
            *changed,
            *self._keeper.unfrozen,
            *notes,
        )

    def _make_started_record(
        self,
        model: nn.Module,
        name: str,
        program: Program,
        data: Iterable[Any],
        notes: tuple[str, ...],
    ) -> events.Started:
        guarantee, why = find_guarantee(data)
        told = f"{self._length:,} batches of " if self._length is not None else "batches of "
        kind = type(data).__name__
        return events.Started(
            generation=self.generation,
            spec_id=SPEC_ID,
            spec={},
            task=name,
            seed=torch.initial_seed(),
            data={
                "describe": told + kind,
                "digest": hashlib.sha256(f"{kind} {self._length}".encode()).hexdigest(),
                "guarantee": guarantee,
            },
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            total_steps=None,
            steps_per_epoch=self._length,
            first_step=self.step + 1,
            notes=(
                *notes,
                f"attached to a training loop of the script; the data are {guarantee}: {why}",
                *describe(self._group),
            ),
            **environment.circumstances(str(self._device), program),
        )

    # ---- while the loop runs

    def begin_pass(self, ahead: int | None) -> Iterator[Any]:
        self._end_epoch(is_over=self._pending.is_ending)
        self._pending.begin_epoch(ahead)
        self._is_inside, self.first_batch = True, 0
        self._unheld.begin()
        # time between two epochs does not count for the throughput
        self._meter.restart_clock()
        self.clock.begin_steps()
        with self.clock.within(DATA):
            batches = self._keeper.begin_pass()
        if (found := self._keeper.difference) is not None:
            self._console.warn(f"{self._group.place}{found.what}; {found.hint}")
            fault = GuardFault(
                self.step, "other-data", "the loop resumes with these data", found.what
            )
            self._write(environment.fault(self.generation, fault))
        return batches

    def between_steps(self) -> None:
        """Save if due, and warn of batches changed in place, before the next batch is read."""
        if self._lent.was_data_changed():
            what = in_place.describe("the loop")
            self._report(GuardFault(self.step, "changed-data", in_place.HINT, what))
        is_between = self._pending.is_between_steps(self._keeper.pass_number)
        if self.step > self._saved_step and is_between and self._keeper.is_due(self.step):
            self.save()
        self._keeper.before_read(self._pending.ahead)

    def save(self) -> None:
        """Save a checkpoint; a storage error cancels this save and never stops the loop."""
        if self._is_unrecorded() or self.step == self._saved_step:
            return
        self._close_window()
        counters = {
            "step": self.step,
            "num_samples": self.num_samples,
            "num_batches": self._num_batches - self._pending.num_in_hand,
            "num_passes": self._num_passes,
            "given": self._given,
            "training_s": self._training_s,
        }
        try:
            with self.clock.within(CHECKPOINT):
                prepare_save(self._group, self.step, self._ledger, self._lock, self._journal.sync)
                made, elapsed_s = self._keeper.save(self.step, counters, self._pending)
        except StorageError as error:
            if self._group.is_first:  # which receives the errors of all ranks
                self._console.warn(f"{error.message}; the loop continues")
            return
        finally:
            if deleted := self._keeper.take_deleted():
                self._console.warn(
                    f"the disk was full: the checkpoint of {deleted} was deleted "
                    "earlier than its retention says; the loop continues"
                )
        self._saved_step = self.step
        for line in (*self._keeper.take_unsaved(), *self._unheld.find_since_attach()):
            self._console.warn(line)
        committed = events.Committed(
            generation=self.generation,
            time_s=time.time(),
            step=self.step,
            num_bytes=made.num_bytes,
            folder=f"checkpoints/step-{self.step:012d}",
            elapsed_s=elapsed_s,
            waited_s=elapsed_s,
        )
        self._write(committed)
        if (slow := self._keeper.take_slow()) is not None and self._group.is_first:
            self._report(Guard.slow_save(slow.step, slow.words, "save="))

    def _report(self, fault: GuardFault) -> None:
        """Print `fault` and write its record."""
        self._console.warn(f"{fault.detail}; {fault.action}")
        self._write(environment.fault(self.generation, fault))

    def on_batch(self, batch: Any, waited_s: float) -> None:
        self._waiting_s += waited_s
        self._lent.lend(batch)
        self._num_batches += 1
        read = self._keeper.take_next(batch)
        num_samples = self._watched.num_drawn or size_of(batch) or 0
        self._pending.add(ReadBatch(*read, num_samples))

    def end_pass(self) -> None:
        self._is_inside = False
        self._pending.end_epoch()
        self._end_epoch(is_over=self._pending.is_last_step_done)
        self._close_window()

    def _end_epoch(self, *, is_over: bool) -> None:
        """Count the epoch if `is_over`, after the steps on batches that were read ahead."""
        if is_over and self._keeper.end_pass():
            self._num_passes += 1

    @property
    def _epoch(self) -> float:
        return self._num_batches / self._length if self._length else float(self._num_passes)

    def _is_unrecorded(self) -> bool:
        """Return whether recording has ended or this process is a fork of the one that records."""
        if not self._is_over and not self.owner.is_here:
            self._is_over = True
            self._console.warn(
                f"{self.owner.describe('this loop')}: this process neither records nor saves it"
            )
        return self._is_over

    def step_done(self, loss: Tensor | float, num_samples: int | None) -> None:
        if self._is_unrecorded():
            return
        value = as_loss(loss)
        taken = self._pending.take()
        read = sum(batch.num_samples for batch in taken)
        count = read if num_samples is None else num_samples
        weight = count or 1  # without batches(), each step has weight 1 in the mean
        self.step += 1
        self.clock.end_step(self.step)
        self._ledger.add_step(self.step, self._keeper.pass_number, [each[:3] for each in taken])
        self._end_epoch(is_over=self._pending.is_last_step_done)
        if (fault := self._pending.find_fault(self.step, len(taken))) is not None:
            self._report(fault)
        self.num_samples += count
        rate = learning_rate_of(self._optimizers[0].param_groups[0])
        report = StepReport(
            step=self.step,
            epoch=self._epoch,
            num_samples=count,
            learning_rate=rate,
            totals={"loss": (value * weight, weight, 1.0)},
            norm=None,
            was_applied=True,
            waiting_s=self._waiting_s,
        )
        self._meter.add(report)
        self._waiting_s = 0.0
        if self.step % self._every == 0 or self.step == 1:
            self._close_window()

    def _close_window(self) -> None:
        with self.clock.within(LOGGING):
            self._write_steps()

    def _write_steps(self) -> None:
        summary = None if self._is_unrecorded() else self._meter.take()
        if summary is None:
            return
        for line in self._unheld.find_new() if self._group.is_first else ():
            self._console.warn(line)
        timing = self.clock.take()
        self._training_s += summary.elapsed_s
        self._loss = summary.loss
        groups = {"optimizer": [group for each in self._optimizers for group in each.param_groups]}
        self._write(
            make_step_record(
                summary, timing, groups, generation=self.generation, device=self._device
            )
        )

    def _write(self, event: events.Event) -> None:
        """Write `event`; a storage error ends the recording and never stops the loop."""
        if self._is_unrecorded():
            return
        try:
            trouble = self._journal.write(event)
        except StorageError as error:
            self._give_up(error)
        else:
            if trouble is not None:
                self._console.warn(trouble)

    def _give_up(self, error: StorageError) -> None:
        self._console.warn(
            f"{self._group.place}{error.message}; the loop continues without records"
        )
        if not self._group.is_alone:  # the other ranks wait for this one in every save
            self._journal.abandon()
            self._journal = NoJournal()
            return
        self._release_lock()

    # ---- the end

    def end_by(self, error: BaseException) -> None:
        """End the recording with the outcome that belongs to `error`, which ended the loop."""
        if isinstance(error, KeyboardInterrupt):
            self.end(
                "interrupted", f"interrupted by Ctrl-C after step {self.step}", EXIT_INTERRUPTED
            )
            return
        if not isinstance(error, Exception):
            code = blame.find_exit_code(error) if isinstance(error, SystemExit) else EXIT_INTERNAL
            self.end(
                "failed" if code else "stopped",
                f"{blame.describe(error)} after step {self.step}",
                code,
            )
            return
        is_placed = str(error).startswith(f"step {self.step}: ")
        made = blame.as_run_error(error, "" if is_placed else f"after step {self.step}:")
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
        if self._is_over or not self.owner.is_here:
            return
        self._close_window()
        if not outcome:
            is_whole = self._num_passes > 0 and not self._is_inside
            outcome = "finished" if is_whole else "stopped"
            passes = "1 pass" if self._num_passes == 1 else f"{self._num_passes} passes"
            cause = f"{passes} over the data" if is_whole else ""
        cause = cause or f"the loop exited after step {self.step}"
        if not self._is_over and not self._lock.is_lost():
            self._write(self._make_ended_record(outcome, cause, exit_code))
        if not self._is_over:
            try:
                self._ledger.sync()
                self._journal.close()
            except StorageError as error:
                self._give_up(error)
        self._release_lock()

    def _make_ended_record(self, outcome: str, cause: str, exit_code: int) -> events.Ended:
        self.clock.take()
        elapsed_s, peak_bytes = time.perf_counter() - self.started_s, peak_resident_bytes()
        num_timed = self.num_samples - self._num_untimed
        samples_per_s = num_timed / self._training_s if self._training_s > 0 else None
        summary = {
            "folder": str(self.folder),
            "step": self.step,
            "epochs": self._epoch,
            "score": "loss",
            "value": self._loss,
            "unit": "",
            "better": "lower",
            "best_value": None,
            "best_step": None,
            "loss": self._loss,
            "num_samples": self.num_samples,
            "elapsed_s": elapsed_s,
            "training_s": self._training_s,
            "samples_per_s": samples_per_s,
            "peak_bytes": peak_bytes,
            "num_skipped": 0,
            "cause": cause,
            "outcome": outcome,
            **timing_rows(self.clock.total()),
        }
        return events.Ended(
            generation=self.generation,
            time_s=time.time(),
            step=self.step,
            outcome=outcome,
            cause=cause,
            exit_code=exit_code,
            elapsed_s=elapsed_s,
            num_samples=self.num_samples,
            samples_per_s=samples_per_s,
            peak_bytes=peak_bytes,
            summary=summary,
        )

    def _release_lock(self) -> None:
        self._is_over = True
        self._stop_listening()
        self._watched.close()
        self._ledger.close()
        self._journal.abandon()
        self._lock.release()
        atexit.unregister(self.end_with_process)
