"""What a spec arm's process runs: warm-up steps, then measured ones, then its report. `python -m surefoot.trial.child`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from surefoot.contract import spec_file
from surefoot.contract.state import StepReport
from surefoot.train.run import Run
from surefoot.trial.report import Clock, capture, peak_bytes, resident_bytes, write_report


def main(words: Sequence[str] | None = None) -> None:
    """Train the spec that `words` (the command line's) name; report what its steps cost, or the tensors that were asked for."""
    asked = _parser().parse_args(words)
    measures = {"imported_bytes": float(resident_bytes())}
    spec = spec_file.read(str(asked.spec)).spec
    found: dict[str, np.ndarray] = {}
    report: StepReport | None = None
    num_measured = 0
    with Run(spec, folder=asked.run) as run:
        steps, clock = run.steps(), Clock()
        for report in islice(steps, asked.warmup):
            _keep(found, run, report, asked.capture)
        with clock:
            for num_measured, report in enumerate(steps, start=1):  # noqa: B007 - the last ones are used below
                _keep(found, run, report, asked.capture)
    loss = None if report is None else report.loss
    if loss is not None and math.isfinite(loss):
        measures["loss"] = loss
    if num_measured and not found:  # taking tensors is no part of a step
        measures |= clock.per(num_measured)
    measures["peak_bytes"] = float(peak_bytes())
    write_report(
        asked.report, measures, facts={"outcome": run.outcome, "cause": run.cause, "spec": spec.id}, arrays=found or None
    )


def _keep(found: dict[str, np.ndarray], run: Run, report: StepReport, wanted: list[int]) -> None:
    loss = report.loss if report.step in wanted else None
    if loss is not None:
        found |= capture(run.model, loss, report.step)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="surefoot.trial.child")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--capture", type=int, action="append", default=[])
    return parser


if __name__ == "__main__":
    main()
