"""Command `surefoot runs`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, TracebackOption
from surefoot.cli.table import format_time, print_table
from surefoot.core.errors import RunFolderError
from surefoot.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from surefoot.cli.look.past import Past

DEFAULT = Path("runs")
HEADERS = ("run", "task", "state", "steps", "score", "time", "when")


def runs(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="the folder to search, with its subfolders"),
    ] = DEFAULT,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="also print the size of each run's files")
    ] = False,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """List the runs below a folder.

    Each line shows a run: its task, state, steps, score and time.
    """
    from surefoot.cli.look import past
    from surefoot.cli.operate import whole_run

    if not folder.is_dir() and folder != DEFAULT:
        raise RunFolderError(
            f"there is no folder {folder}", hint="give the folder that holds the runs"
        )
    rows: list[dict[str, Any]] = []
    lines: list[tuple[str, ...]] = []
    for each in past.find(folder):
        try:
            found = past.read(each)
        except RunFolderError as error:
            print(f"{each} cannot be read: {error.message}", file=sys.stderr)
            rows.append({"run": str(each), "state": past.UNREADABLE, "error": error.message})
            lines.append((str(each), "", past.UNREADABLE, "", "", "", "", *([""] if sizes else [])))
            continue
        num_bytes = whole_run.count_bytes(each) if sizes else None
        rows.append({**found.as_row(), **({"num_bytes": num_bytes} if sizes else {})})
        lines.append((*_line(found), *([format_bytes(num_bytes)] if sizes else [])))
    if json:
        options.print_json({"folder": str(folder), "runs": rows})
    elif lines:
        print_table(
            (*HEADERS, *(["size"] if sizes else [])),
            lines,
            right=("steps", "time", "size") if sizes else ("steps", "time"),
        )
    else:
        print(f"no runs below {folder}; surefoot train digits starts one", file=sys.stderr)


def _line(found: Past) -> tuple[str, ...]:
    from surefoot.cli.look import past

    total = found.started.total_steps
    steps = (
        f"{found.num_steps:,}"
        if total in (None, found.num_steps)
        else f"{found.num_steps:,}/{total:,}"
    )
    score, spent = past.format_score(found, with_best=False), format_seconds(found.elapsed_s)
    return (
        str(found.folder),
        found.started.task,
        found.state,
        steps,
        score,
        spent,
        format_time(found.began_s),
    )
