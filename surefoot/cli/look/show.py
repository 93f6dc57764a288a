"""Command `surefoot show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, RunArgument, TracebackOption
from surefoot.cli.table import without_control
from surefoot.core.errors import EXIT_VERDICT_FAILS, InputError, SpecError
from surefoot.core.units import Duration

if TYPE_CHECKING:
    from surefoot.cli.look.past import Past


def show(
    run: RunArgument,
    health: Annotated[
        bool,
        typer.Option(
            "--health",
            help="print only the state; exit code 0 if the run is running or complete, else 1",
        ),
    ] = False,
    stuck_after: Annotated[
        str | None,
        typer.Option(
            "--stuck-after",
            metavar="TIME",
            help="call a running run stuck after this time without a record",
            show_default="5 min, or 5 times the longest gap between two records",
        ),
    ] = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Summarize a run.

    The summary has the machine, learning curve, evaluations, faults and time by phase, how the run
    ended, the command that repeats it, and whether the run is still running.
    """
    from surefoot.cli.look import past, story

    found = past.read(run, stuck_after_s=None if stuck_after is None else _parse(stuck_after))
    if not health:
        options.print_json(story.as_row(found)) if json else story.print_summary(found)
        return
    steps = {"steps": found.num_steps, "total_steps": found.started.total_steps}
    row = {"run": str(found.folder), **steps, **found.health.as_row()}
    options.print_result(row, print, _line(found), json=json)
    if not found.health.is_in_order:
        raise typer.Exit(EXIT_VERDICT_FAILS)


def _parse(text: str) -> float:
    hint = "give a time with its unit, for example --stuck-after 10min"
    try:
        limit = Duration.parse(text)
    except SpecError as error:
        raise InputError(f"--stuck-after: {error.message}", hint=hint) from None
    if limit.unit != "s":
        raise InputError(f"--stuck-after must be a time; got {text!r}", hint=hint)
    return limit.value


def _line(found: Past) -> str:
    total = "" if found.started.total_steps is None else f" of {found.started.total_steps:,}"
    how = (
        found.health.words
        if found.ended is None or found.health.state != found.ended.outcome
        else found.ended.cause
    )
    return without_control(
        f"{found.folder}: {found.health.state} at step {found.num_steps:,}{total}; {how}"
    )
