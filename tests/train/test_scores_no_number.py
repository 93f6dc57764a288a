"""Decisions over scores that are no numbers: patience, best, a plateau."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from surefoot import Run
from surefoot.components.metrics import Mean
from surefoot.contract.events import Evaluated
from surefoot.train.run import drive
from tests.train.small import Small, records, spec

SCORES = {"nan": Mean(math.nan, 1.0), "infinite": Mean(math.inf, 1.0), "of nothing": Mean(0.0, 0.0)}


class Scored(Small):
    def __init__(self, score: Mean) -> None:
        super().__init__()
        self.score, self.is_training = score, False

    def metrics(self, output: Any, batch: Any) -> dict[str, Mean]:
        # the trial before the run gives a number
        return {"score": self.score if self.is_training else Mean(1.0, 1.0)}


@pytest.mark.parametrize("kind", SCORES)
def test_patience_ends_a_run_whose_score_is_never_a_number(kind: str, tmp_path: Path) -> None:
    task = Scored(SCORES[kind])
    with Run(
        spec(20, evaluate={"every": "1 step", "score": "score", "patience": 3}),
        task,
        folder=tmp_path / "a",
        quiet=True,
    ) as run:
        task.is_training = True
        drive(run)
    evaluated = [event for event in records(tmp_path / "a") if isinstance(event, Evaluated)]
    assert len(evaluated) == 3
    assert not any(event.best for event in evaluated)
    assert "score was NaN or Inf in 3 evaluations" in str(run.cause)


@pytest.mark.parametrize("kind", SCORES)
def test_a_plateau_takes_what_is_no_number_as_not_better(kind: str, tmp_path: Path) -> None:
    task = Scored(SCORES[kind])
    plateau = {"name": "plateau", "patience": 2, "factor": 0.5}
    how = spec(5, evaluate={"every": "1 step", "score": "score"}, schedule=plateau)
    with Run(how, task, folder=tmp_path / "a", quiet=True) as run:
        task.is_training = True
        rates = []
        for report in run.steps():
            rates.append(float(report.learning_rate))
            run.evaluate()
    assert rates[2] == pytest.approx(rates[0] / 2)
