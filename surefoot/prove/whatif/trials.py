"""What the questions that train whole specs side by side have in common: how long the runs are, and what is read off a trial."""

from __future__ import annotations

from surefoot.contract.spec import RunSpec
from surefoot.core.statistics import median
from surefoot.prove.attempts import last_words
from surefoot.prove.ladder import rungs
from surefoot.trial import Trial

LONG = "100000 steps"


def steady(spec: RunSpec) -> RunSpec:
    """The spec so long that neither an evaluation, nor a commit, nor the end of the run falls into what is measured."""
    changes = {"train.length": LONG, "evaluate.every": LONG, "checkpoint.every": LONG, "checkpoint.keep_every": None}
    return rungs.change(spec, changes)


def median_of(trial: Trial, name: str, measure: str) -> float | None:
    """The median of an arm's measure; None where no round has it."""
    found = list(trial.by_round(name, measure).values())
    return median(found) if found else None


def failure_of(trial: Trial, name: str) -> str | None:
    """What an arm said at its end, in a line; None where none failed."""
    failure = trial.failure(name)
    return None if failure is None else last_words(failure).splitlines()[0]
