"""Command `surefoot compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, TracebackOption
from surefoot.core.errors import InputError


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="two or more run folders, or folders that hold several runs"
        ),
    ],
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Compare runs.

    The output shows the differences in spec, versions and machine, the score, the loss at equal
    steps, and the throughput. It gives no verdict, because one run each does not show that a
    difference is more than chance. Folders that hold several runs, as one per seed, are compared
    with intervals.
    """
    from surefoot.cli.look import past, side_by_side

    if len(runs) < 2:
        raise InputError(
            f"compare needs at least two runs; got one: {runs[0]}",
            hint="surefoot runs lists the runs below a folder",
        )
    if any(map(past.holds_runs, runs)):
        from surefoot.cli.look import sides

        groups = [sides.read(folder) for folder in runs]
        if json:
            options.print_json(sides.as_row(groups))
        else:
            sides.print_comparison(groups)
        return
    found = [past.read(folder) for folder in runs]
    if json:
        options.print_json(side_by_side.as_row(found))
    else:
        side_by_side.print_comparison(found)
