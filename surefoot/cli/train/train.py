"""`surefoot train`."""

from __future__ import annotations

from typing import Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import (
    DataOption,
    JsonOption,
    QuietOption,
    RunOption,
    SeedOption,
    SetOption,
    SpecArgument,
    StepsOption,
    TracebackOption,
)


def train(
    spec: SpecArgument, run: RunOption = None, set_: SetOption = None, steps: StepsOption = None, seed: SeedOption = None,
    data: DataOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="begin anew in a new folder; nothing is deleted")] = False,
    accept_code_change: Annotated[bool, typer.Option("--accept-code-change", help="go on although the task's code changed")] = False,
    json: JsonOption = False, quiet: QuietOption = False, traceback: TracebackOption = False,
) -> int:  # fmt: skip
    """Train a task and print how it ended.

    The folder of the run holds its spec, its events and its weights; train the same --run again to go on.
    """
    from surefoot.contract import spec_file

    origin = spec_file.read(spec, options.overrides(set_, steps=steps, seed=seed, data=data))

    from surefoot.components.observe import final_table
    from surefoot.components.observe.console import result_rows
    from surefoot.train.run import Run, drive

    with Run(origin.spec, folder=run, fresh=fresh, accept_code_change=accept_code_change, quiet=quiet) as attempt:
        drive(attempt)
    if json:
        options.print_json(attempt.summary)
    else:
        print(final_table(result_rows(attempt.summary), f"{attempt.task.name}: {attempt.outcome}"))
    return attempt.exit_code
