"""Rendering of the HTML report by templates that escape all text.

The report is one file without scripts or remote assets.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.control.report import curves, machine, rungs, spent
from surefoot.control.report.figure import Figure, Whole
from surefoot.control.report.rows import Flame, Pairs, ReportPage, RunRows, TableRows
from surefoot.core.errors import require_package
from surefoot.core.units import UNKNOWN, format_bytes, format_seconds

MAX_TEXT = 300  # characters of one name or cell
MAX_ROWS = 50  # of checkpoints and faults; the newest are shown
TEMPLATES = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class PagePart:
    """Part of a section: figures, tables, images, commands and notes; empty ones are not shown.

    `pairs` are names and values, `flames` flame graphs as images.
    """

    title: str = ""
    figures: Sequence[Figure] = ()
    pairs: Pairs = ()
    tables: Sequence[TableRows] = ()
    flames: Sequence[Flame] = ()
    commands: Sequence[tuple[str, Whole]] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """Section of the page: its title, the anchor for links, and its parts."""

    anchor: str
    title: str
    parts: Sequence[PagePart]


def render(report: ReportPage) -> str:
    """Return the content of the HTML file.

    Raises:
        MissingExtra: if jinja2 is not installed.
    """
    with require_package("jinja2", "jinja2", extra="report", needed_for="surefoot report"):
        import jinja2
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=sanitize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = environment.get_template("page.css").render()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    runs = report.runs
    title = runs[0].headline if len(runs) == 1 else f"{len(runs)} runs side by side"
    sections = [section for section in _sections(report) if section.parts]
    return environment.get_template("page.html").render(
        title=title,
        style_digest=Whole(digest),
        sections=sections,
        runs=runs,
        version=report.version,
    )


def sanitize(value: Any) -> Any:
    """Remove control characters from text, and truncate the text to `MAX_TEXT` characters.

    Direction marks count as control characters. `Whole` is not truncated. Values that are not text
    are returned unchanged.

    >>> sanitize("exp\\u202egpj.exe"), sanitize("x" * 10_000)[-20:]
    ('exp?gpj.exe', '... (10,000 letters)')
    """
    if (
        not isinstance(value, str)
        or hasattr(value, "__html__")
        or (len(value) <= MAX_TEXT and value.isprintable())
    ):
        return value
    if isinstance(value, Whole) and value.isprintable():
        return value
    lines = "\n\t" if isinstance(value, Whole) else ""
    text = "".join(
        each if each.isprintable() or each in lines else " " if each.isspace() else "?"
        for each in value
    )
    return (
        text if len(text) <= MAX_TEXT or lines else f"{text[:MAX_TEXT]}... ({len(text):,} letters)"
    )


def _sections(report: ReportPage) -> Iterator[Section]:
    runs = report.runs
    yield Section(anchor="summary", title="Summary", parts=list(_summary(report)))
    figures = curves.draw_curves(runs)
    yield Section(
        anchor="curves", title="Curves", parts=[PagePart(figures=figures)] if figures else []
    )
    yield Section(anchor="time", title="Where the time went", parts=list(_time(runs)))
    if report.ladder is not None:
        figure = rungs.draw_rungs(report.ladder)
        parts = [
            PagePart(
                pairs=rungs.describe_ladder(report.ladder),
                tables=rungs.tables_of_rungs(report.ladder),
                figures=[figure] if figure else [],
            )
        ]
        yield Section(anchor="ladder", title="The ladder of optimizations", parts=parts)
    for anchor, title, make in (
        ("roofline", "Roofline", _roofline),
        ("operators", "Operators", _operators),
        ("memory", "Memory", _memory),
        ("flame", "Flame graph", _flames),
    ):
        parts = [part for run in runs for part in make(run, run.name if len(runs) > 1 else "")]
        yield Section(anchor=anchor, title=title, parts=parts)
    yield Section(anchor="profile", title="Profile", parts=list(_profile_notes(runs)))
    yield Section(anchor="saves", title="Checkpoints and faults", parts=list(_describe_saves(runs)))
    yield Section(
        anchor="environment",
        title="Environment",
        parts=[PagePart(tables=[_comparison_table(runs, "environment")])],
    )
    again = [
        PagePart(
            title=run.name if len(runs) > 1 else "",
            commands=[*run.commands, ("the spec", run.spec)],
        )
        for run in runs
    ]
    yield Section(anchor="again", title="How to repeat it", parts=again)


def _summary(report: ReportPage) -> Iterator[PagePart]:
    yield PagePart(tables=[_comparison_table(report.runs, "summary")])
    if report.differences is not None:
        same = (
            []
            if report.differences.rows
            else ["what is recorded of spec, versions, machine, code and data is equal"]
        )
        yield PagePart(
            title="What differs",
            tables=[report.differences] if report.differences.rows else [],
            notes=same,
        )


def _comparison_table(runs: Sequence[RunRows], what: str) -> TableRows:
    """Return a table with a row for each name and a column for each run.

    `what` is the field of `RunRows` with the names and values.
    """
    columns = [dict(_merge_pairs(getattr(run, what))) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    headers = ["", *(run.name for run in runs)] if len(runs) > 1 else ()
    return TableRows(
        headers=headers,
        rows=[[name, *(column.get(name, UNKNOWN) for column in columns)] for name in names],
    )


def _merge_pairs(pairs: Pairs) -> Iterator[tuple[str, str]]:
    """Yield (name, value) pairs; a value without a name is appended to the value before it."""
    merged: dict[str, str] = {}
    last = ""
    for name, value in pairs:
        merged[name or last] = f"{merged[last]}; {value}" if not name and last in merged else value
        last = name or last
    yield from merged.items()


def _time(runs: Sequence[RunRows]) -> Iterator[PagePart]:
    phases = [
        {} if run.phases is None else {each.name: each.total_s for each in run.phases.phases}
        for run in runs
    ]
    for title, found in (
        ("Phases of the newest attempt", phases),
        ("All attempts", [_known(run.goodput.parts) for run in runs]),
    ):
        drawn = spent.draw_bars(title, runs, found)
        if drawn is not None:
            yield PagePart(figures=[drawn[0]], tables=[drawn[1]])
    for run in runs:
        if run.phases is not None:
            title = f"{run.name}, time per step" if len(runs) > 1 else "Time per step"
            yield PagePart(
                title=title,
                tables=list(spent.tables_of_steps(run.phases)),
                notes=list(spent.describe_phases(run.phases)),
            )


def _known(parts: Mapping[str, float | None]) -> dict[str, float]:
    return {name: seconds for name, seconds in parts.items() if seconds is not None}


def _roofline(run: RunRows, title: str) -> Iterator[PagePart]:
    if (found := run.profile.roofline) is not None:
        figure, table = machine.draw_roofline(found), machine.table_of_points(found)
        yield PagePart(
            title=title,
            figures=[figure] if figure else [],
            pairs=machine.describe_roofline(found),
            tables=[table] if table else [],
            notes=[] if figure else ["no roofline is drawn: peaks or counts are n/a"],
        )


def _operators(run: RunRows, title: str) -> Iterator[PagePart]:
    if (table := machine.table_of_operators(run.profile)) is not None:
        steps = UNKNOWN if run.profile.num_steps is None else f"{run.profile.num_steps:,}"
        yield PagePart(
            title=title,
            pairs=[("window", f"{steps} steps, {format_seconds(run.profile.window_s)}")],
            tables=[table],
        )


def _memory(run: RunRows, title: str) -> Iterator[PagePart]:
    if run.memory is not None:
        rows = [[each.change, each.effect] for each in run.memory.remedies]
        tables = [TableRows(headers=("change", "effect on the peak"), rows=rows)] if rows else []
        yield PagePart(title=title, pairs=[("peak", run.memory.words)], tables=tables)
    if (
        run.profile.memory is not None
        and (drawn := machine.draw_memory(run.profile.memory)) is not None
    ):
        yield PagePart(title=title, figures=[drawn[0]], tables=[drawn[1]])


def _flames(run: RunRows, title: str) -> Iterator[PagePart]:
    if run.profile.flames:
        yield PagePart(title=title, flames=run.profile.flames)


def _profile_notes(runs: Sequence[RunRows]) -> Iterator[PagePart]:
    notes = [note for run in runs for note in run.profile.notes]
    bare = [
        run
        for run in runs
        if not (
            run.profile.operators
            or run.profile.roofline
            or run.profile.memory
            or run.profile.flames
        )
    ]
    notes += [
        f"{run.name} has no profile, so operators, roofline, memory and flame graph are n/a"
        for run in bare
    ]
    if notes:
        yield PagePart(notes=notes)


def _describe_saves(runs: Sequence[RunRows]) -> Iterator[PagePart]:
    figure = spent.draw_history(runs)
    if figure is not None:
        yield PagePart(figures=[figure])
    for run in runs:
        commits = [
            [
                f"{each.step:,}",
                format_bytes(each.num_bytes),
                format_seconds(each.elapsed_s),
                format_seconds(each.waited_s),
            ]
            for each in run.commits
        ]
        faults = [[f"{each.step:,}", each.fault, each.detail, each.action] for each in run.faults]
        saved = ("checkpoint at step", "size", "time to save", "time that training waited")
        failed = ("fault at step", "fault", "details", "action")
        notes = [] if commits else ["no checkpoint was saved"]
        yield PagePart(
            title=run.name if len(runs) > 1 else "",
            tables=[
                *_newest(commits, saved, saved, "checkpoints"),
                *_newest(faults, failed, failed[:1], "faults"),
            ],
            notes=[*notes, *([] if faults else ["no fault was recorded"])],
        )


def _newest(
    rows: Sequence[Sequence[str]], headers: Sequence[str], right: Sequence[str], what: str
) -> list[TableRows]:
    """Return a table of the last `MAX_ROWS` rows, which are the newest, as a list.

    Without rows, the list is empty. `what` names the rows in the caption.
    """
    caption = f"the newest {MAX_ROWS} of {len(rows):,} {what}" if len(rows) > MAX_ROWS else ""
    table = TableRows(headers=headers, rows=rows[-MAX_ROWS:], right=right, caption=caption)
    return [table] if rows else []
