"""Command `surefoot report`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import options
from surefoot.cli.options import JsonOption, TracebackOption
from surefoot.cli.table import format_utc, shorten
from surefoot.core.errors import InputError, RunFolderError
from surefoot.core.units import format_bytes

if TYPE_CHECKING:
    from surefoot.cli.look.past import Past
    from surefoot.control.report import RunRows, TableRows, Whole

MAX_RUNS = 8  # the number of distinct line styles
MAX_SPEC_BYTES = 1 << 16
ONE, SEVERAL = "report.html", "compared.html"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="one or more run folders, shown side by side"),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="a new file", show_default="report.html in the run folder"
        ),
    ] = None,
    ladder: Annotated[
        Path | None,
        typer.Option(
            "--ladder", metavar="DIR", help="the folder of a surefoot ladder, to show with the runs"
        ),
    ] = None,
    json: JsonOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Write one run, or several runs side by side, as one HTML file.

    The file has curves, phases, profile, ladder, saves, faults, environment and the command that
    repeats the run. The file contains no script and fetches nothing.
    """
    from surefoot import __version__
    from surefoot.cli.look import past
    from surefoot.control.report import ReportPage, read_ladder, render

    _check_number(runs)
    file = _choose(runs, out)
    found = [past.read(folder) for folder in runs]
    _check_steps(found)
    rows = ReportPage(
        runs=[rows_of(each) for each in found],
        differences=_differences(found) if len(found) > 1 else None,
        ladder=None if ladder is None else read_ladder(ladder),
        version=__version__,
    )
    text = render(rows).encode()
    write_page(file, text, is_new=out is not None)
    row = {"file": str(file), "num_bytes": len(text), "runs": [str(each) for each in runs]}
    options.print_result(row, print, f"{file}  {format_bytes(len(text))}", json=json)


def _check_number(runs: Sequence[Path]) -> None:
    if len(runs) > MAX_RUNS:
        raise InputError(
            f"a report shows at most {MAX_RUNS} runs; got {len(runs)}", hint="give fewer runs"
        )


def _check_steps(found: Sequence[Past]) -> None:
    for each in found:
        if not each.steps:
            raise RunFolderError(
                f"{each.folder} has no steps, so there is nothing to draw",
                hint=f"surefoot show {shlex.quote(str(each.folder))} shows the reason",
            )


def _choose(runs: Sequence[Path], out: Path | None) -> Path:
    """Return the path of the HTML file to write: `out`, or a file in the folder of the first run.

    Raises:
        InputError: if `out` already exists or its folder does not exist.
    """
    if out is None:
        return runs[0] / (ONE if len(runs) == 1 else SEVERAL)
    options.check_new_file(out, "--out", ONE)
    return out


def write_page(file: Path, text: bytes, *, is_new: bool) -> None:
    """Write the page to a draft file and rename it, so that a full disk leaves no partial page.

    An existing page remains until the new one is complete.

    Args:
        file: path of the HTML file.
        text: content of the page.
        is_new: if True, an existing file is not replaced.

    Raises:
        InputError: if the file cannot be written, or if it exists and `is_new` is True.
    """
    import os

    from surefoot.contract.run_folder import files

    draft = file.with_name(files.draft_of(file.name))
    try:
        if not is_new:
            files.write_whole(file.parent, file.name, text)
            return
        try:
            with files.open_new(file.parent, draft.name) as page:
                page.write(text)
            # unlike a rename it never replaces a file that was created meanwhile
            os.link(draft, file)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{file} cannot be written: {error.strerror}", hint="give another file with --out"
        ) from None


def rows_of(past: Past) -> RunRows:
    """Convert a run to the data that the HTML report shows."""
    from surefoot.cli.look.past import format_score
    from surefoot.control.diagnose import find_memory_use
    from surefoot.control.report import RunRows, read_profile, read_shape

    steps = [each for each in past.steps if each.generation == past.started.generation]
    faults = [each for each in past.faults if each.generation == past.started.generation]
    ended = [] if past.ended is None else [past.ended]
    records = [past.started, *steps, *faults, *ended]
    spec_file = shlex.quote(str(past.folder / "spec.toml"))
    score = "" if past.last is None else f", {shorten(format_score(past))}"
    return RunRows(
        name=str(past.folder),
        headline=f"{shorten(past.started.task)}: {past.state}{score}",
        unit=past.started.unit,
        summary=list(_summary(past)),
        environment=list(_environment(past)),
        commands=list(_commands(past)),
        spec=_spec(past),
        steps=past.steps,
        evaluations=past.scored,
        commits=past.commits,
        faults=past.faults,
        goodput=past.goodput,
        phases=past.phases,
        memory=find_memory_use(records, shape=read_shape(past.folder), spec_file=spec_file),
        profile=read_profile(past.folder),
    )


def _summary(past: Past) -> Iterator[tuple[str, str]]:
    from surefoot.cli.look import story

    yield "task", past.started.task
    yield "began", format_utc(past.began_s)
    yield from story.describe_end(past)


def _environment(past: Past) -> Iterator[tuple[str, str]]:
    from surefoot.cli.look import story

    yield from story.describe_environment(past)
    yield "system", str(past.started.machine.get("system", "n/a"))
    yield (
        "variables",
        ", ".join(f"{name}={value}" for name, value in past.started.variables.items())
        or "none that affect training",
    )


def _commands(past: Past) -> Iterator[tuple[str, Whole]]:
    from surefoot.cli.look import story
    from surefoot.control.report import Whole

    folder = shlex.quote(str(past.folder))
    yield "started with", Whole(shlex.join(past.started.command))
    for name, value in story.describe_reproduction(past):
        yield name, Whole(value)
    yield "what happened, and why", Whole(f"surefoot show {folder}\nsurefoot why {folder}")
    yield "this page", Whole(f"surefoot report {folder}")


def _spec(past: Past) -> Whole:
    """Return the text of the run's spec.toml.

    If the file cannot be read, return the spec in the newest start record, as JSON.
    """
    import json

    from surefoot.contract.run_folder import files
    from surefoot.control.report import Whole

    try:
        with files.open_file(past.folder, "spec.toml") as file:
            return Whole(file.read(MAX_SPEC_BYTES).decode(errors="replace"))
    except OSError:
        return Whole(json.dumps(past.started.spec, indent=1)[:MAX_SPEC_BYTES])


def _differences(found: Sequence[Past]) -> TableRows:
    """Return a table of the differences between runs in spec, versions, machine, code and data."""
    from surefoot.cli.look import side_by_side
    from surefoot.control.report import TableRows

    rows = [*side_by_side.spec_differences(found), *side_by_side.circumstance_differences(found)]
    texts = [
        [key, *("-" if value is None else str(value) for value in values)] for key, values in rows
    ]
    return TableRows(headers=["", *(str(each.folder) for each in found)], rows=texts)
