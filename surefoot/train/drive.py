"""The reader's loop as `surefoot train` writes it."""

from __future__ import annotations

from surefoot.train.run import Run


def drive(run: Run) -> None:
    """Take every step of an entered run and evaluate when the spec says so, and once more at the end."""
    for _ in run.steps():
        if run.evaluation_due:
            run.evaluate()
    if run.step > run.last_evaluated and run.is_stopping != "interrupted":
        run.evaluate()
