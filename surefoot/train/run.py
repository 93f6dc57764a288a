"""Run: the whole training loop as a generator driven by the reader's own `for`."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from surefoot.components import checkpoint
from surefoot.components.observe import Console, Journal, Meter, Summary, TensorBoard, peak_resident_bytes
from surefoot.components.stability import Guard
from surefoot.contract import events
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import StepReport
from surefoot.core.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK, RunFolderError, StorageError, SurefootError
from surefoot.train import blame, environment, folder, preflight
from surefoot.train.assemble import Assembly, assemble, set_seeds, take_task
from surefoot.train.evaluate import Evaluation, evaluate
from surefoot.train.scores import Scores


class Run:
    """One attempt at a run, as a context.

    `spec` says everything; `task` may be an object built in a script instead of what `[task] use` names. `folder` is a new one by
    default. Raises InputError before anything is written, RunError once it goes on.

        with Run(spec) as run:
            for report in run.steps():
                if run.evaluation_due:
                    run.evaluate()
    """

    def __init__(
        self, spec: RunSpec, task: Any = None, *, folder: str | Path | None = None, fresh: bool = False,
        accept_code_change: bool = False, quiet: bool = False,
    ) -> None:  # fmt: skip
        self.spec = spec
        self._given_task, self._wanted = task, None if folder is None else Path(folder)
        self._fresh, self._accept, self._quiet = fresh, accept_code_change, quiet
        self._stop: tuple[str, str] | None = None
        self._meter = Meter()
        self.step = 0
        self.num_samples = 0
        self.training_s = 0.0
        self.cause = self.outcome = ""
        self.exit_code = EXIT_OK
        self.summary: dict[str, Any] = {}
        self._restore: list[Any] = []

    # ---- beginning

    def __enter__(self) -> Self:
        self._restore.append(environment.apply(self.spec))
        try:
            self._begin()
        except BaseException:
            self._put_back()
            raise
        return self

    def _begin(self) -> None:
        set_seeds(self.spec.train.seed)
        task, self.spec = take_task(self.spec, self._given_task)
        digest = folder.code_digest(task.importable, task.task)
        choice = functools.partial(
            folder.choose, self._wanted, self.spec, task.name, digest, fresh=self._fresh, accept_code_change=self._accept
        )
        choice()  # a folder that cannot be used is told before the data are read
        self.assembly: Assembly = assemble(self.spec, task)
        self.model, self.task = self.assembly.model, task
        notes = [*self.assembly.notes, *preflight.check(self.assembly)]
        with folder.taken(choice, environment.as_run(self.spec)) as (chosen, self._lock):
            self._open(chosen, digest, notes)
        self._listen()

    def _open(self, chosen: folder.Chosen, digest: str, notes: list[str]) -> None:
        """Open what is written to and write the first record."""
        self.folder, self.generation = chosen.folder, self._lock.generation
        course = self.assembly.course
        self._tensorboard = TensorBoard(
            self.folder / "tensorboard", wanted=self.spec.observe.tensorboard, purge_step=0 if chosen.is_again else None
        )
        self._journal = Journal(self.folder)
        self._scores = Scores(self.assembly)
        self._guard = Guard(self.spec.stability)
        self._window = max(1, course.to_steps(self.spec.observe.every) or 1)
        self.started_s = time.perf_counter()
        self._write(environment.started(self.assembly, self.generation, digest, (*chosen.notes, *notes)))
        self._console = Console(total_steps=course.total_steps, unit=self.task.unit, quiet=self._quiet)
        for note in (*chosen.notes, f"run folder {self.folder}"):
            self._console.say(note)

    def _listen(self) -> None:
        """The first Ctrl-C ends the run after the step; the second is an ordinary KeyboardInterrupt."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGINT)

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, before)
            self._stop = ("interrupted", "interrupted by Ctrl-C")
            self._console.say("ending after this step; Ctrl-C again stops at once")

        signal.signal(signal.SIGINT, on_interrupt)
        self._restore.append(lambda: signal.signal(signal.SIGINT, before))

    # ---- the loop

    def steps(self) -> Iterator[StepReport]:
        """Yield a StepReport after each optimiser step until the spec's length, a stop, or the reader's own end."""
        stepper, total, window = self.assembly.engine.stepper, self.assembly.course.total_steps, self._window
        self._meter.restart_clock()
        while self._stop is None and not self._is_over(total):
            number = self.step + 1
            try:
                report = stepper(number)
            except Exception as error:
                raise blame.as_run_error(error, f"step {number}:") from error
            self.step = number
            self.num_samples += report.num_samples
            self._meter.add(report)
            self._guard.watch(report)
            if number % window == 0 or number == 1 or report.was_applied is False:
                self._close_window()
            if self._commit_due:
                self._commit(None)
            yield report
        self._close_window()
        if self._stop is None:
            self._stop = ("finished", "the length of the run was reached")

    def _is_over(self, total: int | None) -> bool:
        if total is not None:
            return self.step >= total
        return time.perf_counter() - self.started_s >= self.assembly.course.length.value

    def _close_window(self) -> None:
        summary = self._meter.take()
        if summary is None:
            return
        self.training_s += summary.elapsed_s
        self._write(self._step_event(summary))
        for fault in self._guard.judge(summary.step):
            self._write(environment.fault(self.generation, fault))
            self._console.say(f"step {fault.step}: {fault.detail}; {fault.action}")
        self._console.step(summary)
        self._guard.raise_if_over(summary.step)

    def _step_event(self, summary: Summary) -> events.Step:
        rates = {f"{u.name}.{i}" if i else u.name: g["lr"] for u in self.assembly.updates for i, g in enumerate(u.guarded.groups)}
        return events.Step(
            generation=self.generation, time_s=time.time(), step=summary.step, epoch=summary.epoch, num_steps=summary.num_steps,
            loss=summary.loss, terms=summary.terms, gradient_norm=summary.gradient_norm,
            learning_rates={name: float(rate) for name, rate in rates.items()}, num_applied=summary.num_applied,
            num_samples=summary.num_samples, num_items=summary.num_items, elapsed_s=summary.elapsed_s, waiting_s=summary.waiting_s,
            samples_per_s=summary.samples_per_s, items_per_s=summary.items_per_s, peak_bytes=peak_resident_bytes(),
        )  # fmt: skip

    @property
    def is_stopping(self) -> str | None:
        """ "stopped" or "interrupted" once the run is to end, else None."""
        return self._stop[0] if self._stop is not None else None

    @property
    def last_evaluated(self) -> int:
        """The step whose weights were evaluated last, 0 if none were."""
        return self._scores.last_step

    @property
    def num_skipped(self) -> int:
        """Steps that were skipped because their numbers were not finite."""
        return self._guard.num_skipped

    def stop(self, reason: str) -> None:
        """End the run after this step; `reason` stands in its Ended event."""
        self._stop = ("stopped", reason)

    # ---- evaluation and weights

    @property
    def evaluation_due(self) -> bool:
        """Whether the spec wants an evaluation after this step: every so often, and at the end."""
        return self._scores.is_due(self.step) or (
            self.assembly.course.total_steps is not None and self.step == self.assembly.course.total_steps
        )

    @property
    def _commit_due(self) -> bool:
        every = self.spec.checkpoint.every
        steps = None if every is None else self.assembly.course.to_steps(every)
        return bool(steps) and self.step % steps == 0  # type: ignore[operator]

    def evaluate(self, split: str | None = None) -> Evaluation:
        """Evaluate the weights of this step on `split` (the spec's by default), commit them if they are the best so far."""
        spec, name = self.spec, split or self.spec.evaluate.split
        self._close_window()
        try:
            with self._averaged():
                result = evaluate(
                    self.model, self.task, self.assembly.evaluation(name), split=name, device=self.assembly.engine.device,
                    batch=spec.evaluate.batch or spec.train.batch, score=spec.evaluate.score, compute=self.assembly.engine.compute,
                )  # fmt: skip
        except Exception as error:
            raise blame.as_run_error(error, f"evaluation after step {self.step}:") from error
        counts = name == spec.evaluate.split
        best = counts and self._scores.add(self.step, result)
        epoch = self.assembly.feed.epoch_of(self.step)
        self._write(
            events.Evaluated(
                generation=self.generation,
                time_s=time.time(),
                step=self.step,
                split=name,
                num_samples=result.num_samples,
                loss=result.loss,
                metrics=result.metrics,
                score=result.score,
                better=result.better,
                best=best,
                elapsed_s=result.elapsed_s,
                units=result.units,
            )
        )
        self._console.evaluated(self.step, epoch, result.score, result.value, result.units.get(result.score, ""), best)
        if best:
            self._commit(result)
        if counts and (reason := self._scores.reason_to_stop()):
            self.stop(reason)
        self._meter.restart_clock()
        return result

    def _averaged(self) -> Any:
        return self.assembly.engine.average.swapped_in() if self.assembly.engine.average is not None else torch.no_grad()

    def _commit(self, result: Evaluation | None) -> None:
        """Commit the weights; what the disk refuses ends this commit, not the run."""
        started_s = time.perf_counter()
        if not self._lock.still_ours():
            raise RunFolderError(f"{self.folder} was taken over by a later attempt", hint="this attempt ends here")
        score = None
        if result is not None and result.split == self.spec.evaluate.split:
            score = {"name": result.score, "value": result.value, "better": result.better, "split": result.split}
        try:
            with self._averaged():
                num_bytes = checkpoint.commit(
                    self.folder, self.step, self.model, generation=self.generation, spec_id=self.spec.id,
                    environment=environment.versions(), score=score,
                )  # fmt: skip
        except StorageError as error:
            self._write(environment.fault(self.generation, self._guard.storage_fault(self.step, error.message)))
            self._console.say(f"{error.message}; the run goes on")
            return
        if num_bytes:
            self._write(
                events.Committed(
                    generation=self.generation,
                    time_s=time.time(),
                    step=self.step,
                    num_bytes=num_bytes,
                    folder=f"checkpoints/step-{self.step:012d}",
                    elapsed_s=time.perf_counter() - started_s,
                )
            )
            checkpoint.retain(self.folder, keep=self.spec.checkpoint.keep, best=self._scores.best_step)

    # ---- ending

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._end(error)
        finally:
            self._put_back()

    def _end(self, error: BaseException | None) -> None:
        outcome, cause, code = self._outcome(error)
        self.cause, self.outcome, self.exit_code = cause, outcome, code
        try:
            if outcome != "failed" and self.step:
                self._close_window()
                self._commit(self._scores.result_of(self.step))
            summary = self._scores.summary(self)
            self._write(
                events.Ended(
                    generation=self.generation,
                    time_s=time.time(),
                    step=self.step,
                    outcome=outcome,
                    cause=cause,
                    exit_code=code,
                    elapsed_s=time.perf_counter() - self.started_s,
                    num_samples=self.num_samples,
                    samples_per_s=summary["samples_per_s"],
                    peak_bytes=summary["peak_bytes"],
                    summary=summary,
                )
            )
            self.summary = summary
        except SurefootError as problem:
            if error is None:
                raise
            self._console.warn(f"the end of the run could not be written: {problem.message}")
        finally:
            self._console.close()

    def _outcome(self, error: BaseException | None) -> tuple[str, str, int]:
        if isinstance(error, KeyboardInterrupt):
            return "interrupted", "interrupted at once by a second Ctrl-C", EXIT_INTERRUPTED
        if isinstance(error, SurefootError):
            return "failed", error.message, error.exit_code
        if isinstance(error, Exception):
            made = blame.as_run_error(error, f"after step {self.step}:")
            return "failed", made.message, made.exit_code
        if error is not None:
            return "failed", f"{type(error).__name__} after step {self.step}", EXIT_INTERNAL
        if self._stop is None:
            return "stopped", f"the loop was left at step {self.step}", EXIT_OK
        outcome, cause = self._stop
        return outcome, cause, EXIT_INTERRUPTED if outcome == "interrupted" else EXIT_OK

    def _put_back(self) -> None:
        for name in ("_tensorboard", "_journal", "_lock"):
            part = self.__dict__.get(name)
            if part is not None:
                part.release() if name == "_lock" else part.close()
        while self._restore:
            self._restore.pop()()

    def _write(self, event: events.Event) -> None:
        self._journal.write(event)
        self._tensorboard.write(event)
