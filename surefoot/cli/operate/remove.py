"""Command `surefoot remove`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, RunArgument, TracebackOption

GONE = ".removed-"


def remove(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="delete the run without asking")] = False,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Delete a run folder with all its contents.

    The command refuses a run that is running. Links in the folder are deleted, but never their
    targets.
    """
    import shutil
    import sys

    from surefoot.cli.operate.whole_run import check_is_run, count_bytes, list_files, lock_run
    from surefoot.core.errors import InputError
    from surefoot.core.units import format_bytes

    check_is_run(run)
    num_files, num_bytes = len(list_files(run)), count_bytes(run)
    what = f"{run}: {num_files:,} files, {format_bytes(num_bytes)}"
    if not yes:
        if not sys.stdin.isatty():
            raise InputError(
                f"deleting {what} needs confirmation, and standard input is not a terminal",
                hint="add --yes to delete without asking",
            )
        typer.confirm(f"Delete {what}?", abort=True, err=True)
    hidden = _find_hidden_name(run)
    try:
        with lock_run(run):
            run.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise InputError(
            f"{run} cannot be deleted: {error.strerror}",
            hint=f"delete the remaining files manually: {hidden if hidden.exists() else run}",
        ) from error
    if json:
        options.print_json({"run": str(run), "num_files": num_files, "num_bytes": num_bytes})
    else:
        print(f"deleted {what}")


def _find_hidden_name(run: Path) -> Path:
    """Return an unused hidden path beside the run folder.

    The run is renamed to this path before it is deleted. If the deletion is interrupted, no command
    takes the remaining files for a run.
    """
    run = run.resolve()
    number = 1
    while (
        hidden := run.with_name(f"{GONE}{run.name}" + (f"-{number}" if number > 1 else ""))
    ).exists():
        number += 1
    return hidden
