"""Run: the training loop as a generator that the user's `for` drives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from surefoot.components.profiler.phases import clock as phases
from surefoot.contract.spec import RunSpec
from surefoot.contract.spec_file import Origin, as_spec
from surefoot.contract.state import StepReport
from surefoot.contract.task import check_not_importing
from surefoot.core.errors import InputError
from surefoot.train import environment
from surefoot.train.evaluate import Evaluation
from surefoot.train.failure import blame
from surefoot.train.failure.script_exit import script
from surefoot.train.resume.start import Start
from surefoot.train.session.facts import HINT_OPEN, NOT_OPEN, RunFacts
from surefoot.train.session.folder import RunFolderRequest
from surefoot.train.session.opening import RunRequest, open_session
from surefoot.train.session.session import RunSession


class Run(RunFacts):
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
        asked = RunRequest(
            spec=as_spec(spec),
            task=task,
            wanted=RunFolderRequest(folder),
            fresh=fresh,
            accept_code_change=accept_code_change,
            accept_data=accept_data,
            quiet=quiet,
            start=start,
        )
        super().__init__(asked)
        self._opened, self._is_open = ExitStack(), False

    def __enter__(self) -> Self:
        check_not_importing()
        script.watch()
        self._opened.callback(environment.apply(self.spec))
        with ExitStack() as unless_begun:
            unless_begun.callback(self._opened.close)
            with blame.as_task_errors():
                self._session = open_session(self._asked, self._opened, self._stops)
            unless_begun.pop_all()
        self._is_open = True
        return self

    def steps(self) -> Iterator[StepReport]:
        """Take the steps of the run and yield a StepReport after each, until its end or a stop."""
        session = self._check_open()
        take_next = session.begin_steps()
        while not session.is_over():
            report = take_next()
            session.step_done(report)
            yield report
            # a process that the loop body has forked may also return to this line
            if not (self._is_open and session.owner.is_here):
                self._check_open()
            # after the loop body: its evaluation of this step is saved with the weights
            session.save_if_due()
        session.end_steps()

    def evaluate(self, split: str | None = None) -> Evaluation:
        """Evaluate the current weights on `split` (default: the spec's); save them if best."""
        return self._check_open().evaluate(split or self.spec.evaluate.first_split)

    def save(self) -> None:
        """Save a checkpoint of this step now; return once it is on disk or has failed."""
        self._check_open().save()

    def stop(self, reason: str) -> None:
        """End the run after this step; the Ended record holds `reason` of the first call."""
        self._stops.stop(reason)

    def state_digests(self) -> dict[str, str]:
        """Return a SHA-256 (hex) per component of the state; equal for identical states."""
        return self._check_open().state_digests()

    def _check_open(self) -> RunSession:
        if not self._is_open:
            raise InputError(NOT_OPEN, hint=HINT_OPEN)
        self.session.owner.check("this run")
        return self.session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        session = self.session
        if not session.owner.is_here:
            return  # only the process that opened the run ends it
        # an error may have interrupted any phase
        session.assembly.engine.steps.clock.switch(phases.OTHER)
        try:
            if error is None:
                session.save_last()
        except BaseException as problem:
            error = problem
            raise
        finally:
            self._is_open, self._stops.is_leaving = False, True
            with self._opened:
                session.end(error)


def drive(run: Run) -> None:
    """Take all steps of an open run; evaluate at the intervals of the spec and at the end."""
    for _ in run.steps():
        for split in run.splits_due:
            run.evaluate(split)
    if run.step and run.is_stopping != "interrupted":
        for split in run.splits_left:
            run.evaluate(split)
