"""Command `surefoot evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import (
    DataOption,
    JsonOption,
    QuietOption,
    RunArgument,
    SplitOption,
    StepOption,
    TaskOption,
    TracebackOption,
)

Fp32Option = Annotated[
    bool,
    typer.Option(
        "--fp32", help="evaluate in fp32 too, and print the difference from the run's precision"
    ),
]


def evaluate(
    run: RunArgument,
    split: SplitOption = None,
    step: StepOption = "best",
    fp32: Fp32Option = False,
    data: DataOption = None,
    task: TaskOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Evaluate the saved weights of a run on a split, in the precision of its training."""
    options.import_torch()
    from surefoot.components.observe.console import format_score
    from surefoot.core.units import format_number
    from surefoot.train.look_back import evaluate_run

    results, used = evaluate_run(run, step, split, data, fp32=fp32, quiet=quiet or json, use=task)
    own, last = results[0], results[-1]
    rows = {each.precision: {"loss": each.loss, **each.metrics} for each in results}
    ours, theirs = rows[own.precision], rows[last.precision]
    gaps = {
        name: None if None in (ours[name], value) else ours[name] - value  # type: ignore[operator]
        for name, value in theirs.items()
    }
    if json:
        row = {
            "run": str(run),
            "step": used,
            "split": own.split,
            "num_samples": own.num_samples,
            "loss": own.loss,
            "metrics": own.metrics,
            "score": own.score,
            "value": own.value,
            "precision": own.precision,
        }
        options.print_json({**row, "fp32": {"values": theirs, "gaps": gaps}} if fp32 else row)
        return
    for result in results:
        if fp32:
            print(f"in {result.precision}:")
        for name, value in rows[result.precision].items():
            gap = (
                f" ({own.precision} differs by {format_number(gaps[name])})"
                if result is not own
                else ""
            )
            print(format_score(name, value, result.units.get(name, "")) + gap)
