"""Helpers to measure specs: the length of their runs, and values from a trial."""

from __future__ import annotations

from typing import Any

from surefoot.contract.spec import RunSpec
from surefoot.core.statistics import median
from surefoot.prove.attempts import find_last_error
from surefoot.prove.ladder import rungs
from surefoot.trial import Trial

LONG = "100000 steps"


def make_steady_spec(spec: RunSpec) -> RunSpec:
    """Return the spec with a run so long that only training steps are measured.

    No evaluation, no checkpoint and no end of the run occurs during the measurement.
    """
    changes: dict[str, Any] = {
        "train.length": LONG,
        "checkpoint.every": LONG,
        "checkpoint.keep_every": None,
    }
    if spec.evaluate.every != "never":
        changes["evaluate.every"] = LONG
    return rungs.change(spec, changes)


def median_of(trial: Trial, name: str, measure: str) -> float | None:
    """Return the median of a variant's measure over the rounds; None if no round has it."""
    found = list(trial.by_round(name, measure).values())
    return median(found) if found else None


def failure_of(trial: Trial, name: str) -> str | None:
    """Return the error of the first failed run of a variant in one line; None if no run failed."""
    failure = trial.failure(name)
    return None if failure is None else find_last_error(failure).splitlines()[0]
