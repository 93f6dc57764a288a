"""`surefoot train`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import (
    DataOption,
    JsonOption,
    QuietOption,
    RangeOption,
    RestartsOption,
    RunOption,
    SeedOption,
    SetOption,
    SpecArgument,
    StepsOption,
    TracebackOption,
)

if TYPE_CHECKING:
    from surefoot.train.resume.start import Start
    from surefoot.train.run import Run


def train(
    spec: SpecArgument, run: RunOption = None, set_: SetOption = None, steps: StepsOption = None, seed: SeedOption = None,
    data: DataOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="begin anew in a new folder; nothing is deleted")] = False,
    accept_code_change: Annotated[bool, typer.Option("--accept-code-change", help="go on although the task's code changed")] = False,
    accept_data: Annotated[bool, typer.Option("--accept-data", help="resume although other data come than before")] = False,
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="DIR", help="begin with what fits of the weights of a run or an import")
    ] = None,
    ranks: RangeOption = None, max_restarts: RestartsOption = None,
    json: JsonOption = False, quiet: QuietOption = False, traceback: TracebackOption = False,
) -> int:  # fmt: skip
    """Train a task and print how it ended.

    The folder of the run holds its spec, its events and its weights; train the same --run again to go on. With --ranks it is trained by
    so many processes of this host, to the same numbers.
    """
    from surefoot.contract import spec_file

    origin = spec_file.read(spec, options.overrides(set_, steps=steps, seed=seed, data=data))
    if ranks is not None:
        goes_on = run is not None and not fresh and weights is None
        return options.launch_ranks(ranks, origin.spec, run if goes_on else None, max_restarts)

    from surefoot.train.run import Run

    start = None if weights is None else _start(weights)
    return finish(
        Run(
            origin.spec,
            folder=run,
            fresh=fresh,
            accept_code_change=accept_code_change,
            accept_data=accept_data,
            quiet=quiet,
            start=start,
        ),
        json=json,
    )


def _start(weights: str) -> Start:
    """The commit that `--weights` names."""
    from surefoot.cli.operate import stored
    from surefoot.train.resume.start import Start

    folder = stored.find_commit(weights, "best")
    return Start(folder.parent.parent, int(folder.name.removeprefix("step-")), weights_only=True)


def finish(attempt: Run, *, json: bool) -> int:
    """Take a run to its end and print how it ended; gives the exit code."""
    from surefoot.components.observe import final_table
    from surefoot.components.observe.console import result_rows
    from surefoot.core import flight, place
    from surefoot.train.run import drive

    with attempt:
        drive(attempt)
    if not attempt.group.is_first or (attempt.outcome == "interrupted" and flight.is_recalled(place.flight_file())):
        return attempt.exit_code
    if json:
        options.print_json(attempt.summary)
    else:
        print(final_table(result_rows(attempt.summary), f"{attempt.task.name}: {attempt.outcome}"))
    return attempt.exit_code
