"""`surefoot compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, TracebackOption


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="two run folders or more, or folders of runs"),
    ],
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Lay runs side by side.

    What differs in spec, versions and machine; score, loss at equal steps, speed. It claims
    nothing: one run each is no proof. Folders with several runs, as one for each seed, are compared
    side against side, with intervals.
    """
    from surefoot.cli.look import past, side_by_side
    from surefoot.core.errors import InputError

    if len(runs) < 2:
        raise InputError(
            f"{runs[0]} is one run, and a comparison needs two",
            hint="surefoot runs lists the runs below a folder",
        )
    if any(map(past.holds_runs, runs)):
        from surefoot.cli.look import sides

        groups = [sides.read(folder) for folder in runs]
        if json:
            options.print_json(sides.as_row(groups))
        else:
            sides.tell(groups)
        return
    found = [past.read(folder) for folder in runs]
    if json:
        options.print_json(side_by_side.as_row(found))
    else:
        side_by_side.tell(found)
