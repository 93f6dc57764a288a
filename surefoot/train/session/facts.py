"""Facts of a run that a loop over its steps can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from surefoot.contract.spec import RunSpec
from surefoot.contract.task import ResolvedTask
from surefoot.core.errors import InputError
from surefoot.runtime.comm.group import Group
from surefoot.train.assemble import Assembly
from surefoot.train.failure.ending import StopRequests
from surefoot.train.session.opening import RunRequest
from surefoot.train.session.session import RunResult, RunSession

NOT_OPEN = "this run is not open"
HINT_OPEN = "use the run inside its block: with Run(spec) as run: ..."


class RunFacts:
    """Facts of a run that are read from its request, its session and the requests to end it."""

    def __init__(self, asked: RunRequest) -> None:
        self._asked, self._stops = asked, StopRequests()
        self._session: RunSession | None = None

    @property
    def session(self) -> RunSession:
        """Session of the run, with all parts. Raises InputError before the run is open."""
        if self._session is None:
            raise InputError(NOT_OPEN, hint=HINT_OPEN)
        return self._session

    @property
    def spec(self) -> RunSpec:
        return self._asked.spec if self._session is None else self.assembly.spec

    @property
    def assembly(self) -> Assembly:
        """Parts that the run trains with: model, data, optimizers, schedule."""
        return self.session.assembly

    @property
    def model(self) -> nn.Module:
        return self.assembly.model

    @property
    def task(self) -> ResolvedTask:
        return self.assembly.task

    @property
    def group(self) -> Group:
        """Ranks of the run."""
        return self.session.group

    @property
    def folder(self) -> Path:
        """Path of the run folder as given; absolute if the working folder has changed since."""
        return self.session.folder()

    @property
    def step(self) -> int:
        """Number of steps in all attempts; 0 before the run is open."""
        return 0 if self._session is None else self._session.progress.step

    @property
    def num_samples(self) -> int:
        """Number of samples that the steps were computed on, in all attempts."""
        return 0 if self._session is None else self._session.progress.num_samples

    @property
    def training_s(self) -> float:
        """Seconds of training in all attempts, up to the last record of steps."""
        return 0.0 if self._session is None else self._session.progress.training_s

    @property
    def generation(self) -> int:
        """Number of the attempt, from 1."""
        return self.session.lock.generation

    @property
    def num_skipped(self) -> int:
        """Number of skipped steps: gradients were non-finite, or the loss counted no item."""
        return self.session.progress.guard.num_skipped

    @property
    def evaluates(self) -> bool:
        """True if the run evaluates the split of its spec, by its interval and at the end."""
        return self.session.assembly.evaluates

    @property
    def last_evaluated(self) -> int:
        """Step whose weights were evaluated last; 0 if there was no evaluation."""
        return self.session.progress.scores.last_step

    @property
    def evaluation_due(self) -> bool:
        """True if an evaluation of the first split is due after this step, as in `splits_due`."""
        return self.session.assembly.spec.evaluate.first_split in self.splits_due

    @property
    def splits_due(self) -> tuple[str, ...]:
        """Splits whose evaluation is due after this step, by the spec's intervals or at the end."""
        return self.session.progress.splits_due()

    @property
    def splits_left(self) -> tuple[str, ...]:
        """Splits of the spec that were not evaluated after this step."""
        return self.session.progress.scores.left(self.session.progress.step)

    @property
    def is_stopping(self) -> str | None:
        """Outcome "stopped" or "interrupted" if the run ends after this step, else None."""
        return self._stops.outcome[0] if self._stops.outcome is not None else None

    @property
    def outcome(self) -> str:
        """Outcome, such as "finished"; "" before the end of the run."""
        return self._result.outcome

    @property
    def cause(self) -> str:
        """Cause of the outcome; "" before the end of the run."""
        return self._result.cause

    @property
    def exit_code(self) -> int:
        """Exit code of `surefoot train` for this outcome."""
        return self._result.exit_code

    @property
    def summary(self) -> dict[str, Any]:
        """Rows of the final table; empty before the end of the run."""
        return self._result.summary

    @property
    def _result(self) -> RunResult:
        return RunResult() if self._session is None else self._session.result
