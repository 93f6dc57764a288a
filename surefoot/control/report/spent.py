"""Figures and tables of the time of a run, and of its checkpoints, restarts and faults."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from surefoot.control.diagnose import Phases, Spread
from surefoot.control.report.figure import (
    LETTERS,
    NUM_STYLES,
    Box,
    Figure,
    Frame,
    Key,
    Mark,
    Path,
    Words,
    cut,
)
from surefoot.control.report.rows import RunRows, TableRows
from surefoot.core.axis import LARGEST, Axis, find_axis
from surefoot.core.units import format_percent, format_seconds

SPREAD = ("mean", "p50", "p95", "p99", "max")
MAX_OUTLIERS = 10
BAR, ROW, WIDTH, LEFT = 26, 44, 460, 6
SIDE = 20  # margin of the history on both sides: half of a tick's label
LETTER_ROOM = 14.0  # minimum width in pixels of a part that shows its letter
COMMITTED, FAULTED, BEGAN = 0, 1, 2  # markers of the history


def draw_bars(
    title: str, runs: Sequence[RunRows], spent: Sequence[Mapping[str, float]]
) -> tuple[Figure, TableRows] | None:
    """Draw a bar for each run, divided into the parts of its time, and a table of the parts.

    Each part has the same letter in the bar and in the table. Return None if there are no parts.

    Args:
        title: title of the figure.
        runs: runs, in the order of the bars.
        spent: seconds of each part, for each run.
    """
    spent = [{name: value for name, value in each.items() if 0 < value < LARGEST} for each in spent]
    names = list(dict.fromkeys(name for each in spent for name in each))
    if not names:
        return None
    letters = {name: LETTERS[index % 26] for index, name in enumerate(names)}
    boxes: list[Box] = []
    words: list[Words] = []
    for row, (run, each) in enumerate(zip(runs, spent, strict=True)):
        top, total, x = row * ROW + 18.0, math.fsum(each.values()), float(LEFT)
        label = (
            f"{cut(run.name, 44)}: {format_seconds(total)}"
            if len(runs) > 1
            else format_seconds(total)
        )
        words.append(Words(x=LEFT, y=top - 5, text=label, style="title"))
        for name in names:
            width = each.get(name, 0.0) / total * (WIDTH - 2 * LEFT) if total else 0.0
            if width > 0:
                tooltip = (
                    f"{name}: {format_seconds(each[name])}, {format_percent(each[name] / total)}"
                )
                boxes.append(
                    Box(
                        x=x,
                        y=top,
                        width=width,
                        height=BAR,
                        style=f"part f{names.index(name) % NUM_STYLES}",
                        tooltip=tooltip,
                    )
                )
            if width >= LETTER_ROOM:
                words.append(
                    Words(
                        x=x + width / 2,
                        y=top + 18,
                        text=letters[name],
                        anchor="middle",
                        style="inside",
                    )
                )
            x += width
    figure = Figure(title=title, width=WIDTH, height=len(runs) * ROW + 6, boxes=boxes, words=words)
    return figure, _table(names, letters, runs, spent)


def _table(
    names: Sequence[str],
    letters: Mapping[str, str],
    runs: Sequence[RunRows],
    spent: Sequence[Mapping[str, float]],
) -> TableRows:
    headers = [
        "",
        "part",
        *(name for run in runs for name in ((run.name if len(runs) > 1 else "time"), "share")),
    ]
    totals = [math.fsum(each.values()) for each in spent]
    rows = [
        [
            letters[name],
            name,
            *(
                cell
                for each, total in zip(spent, totals, strict=True)
                for cell in _cells(each.get(name), total)
            ),
        ]
        for name in names
    ]
    return TableRows(
        headers=headers,
        rows=rows,
        right=headers[2:],
        swatches=[index % NUM_STYLES for index in range(len(names))],
        is_narrow=True,
    )


def _cells(seconds: float | None, total: float) -> tuple[str, str]:
    if seconds is None:
        return "0 s", "0 %"
    return format_seconds(seconds), format_percent(seconds / total if total > 0 else None)


def tables_of_steps(phases: Phases) -> Iterator[TableRows]:
    """Yield a table of the seconds per step by phase, and if there are any, one of slow steps."""
    headers = ("phase", *SPREAD)
    rows = [[each.name, *_spread(each.a_step)] for each in phases.phases if each.total_s > 0]
    rows.append(["step", *_spread(phases.step)])
    yield TableRows(
        headers=headers,
        rows=rows,
        right=SPREAD,
        caption="per step; the values of a phase are over the means of the records",
    )
    slow = [
        [f"{row['step']:,}", format_seconds(row["elapsed_s"]), str(row["cause"])]
        for row in phases.outliers[:MAX_OUTLIERS]
    ]
    if slow:
        others = sum(phases.causes.values()) - len(slow)
        caption = f"{others:,} more slow steps are not shown" if others > 0 else ""
        yield TableRows(
            headers=("slow step", "time", "cause"),
            rows=slow,
            right=("slow step", "time"),
            caption=caption,
        )


def describe_phases(phases: Phases) -> Iterator[str]:
    """Yield a sentence that compares the sum of all phases with an independent clock."""
    if phases.coverage is not None:
        wall = format_seconds(phases.wall_s)
        yield (
            f"the phases add up to {format_seconds(phases.total_s)}, "
            f"{format_percent(phases.coverage)} of the {wall} that an independent clock measured"
        )


def _spread(spread: Spread | None) -> list[str]:
    return [format_seconds(getattr(spread, f"{name}_s", None)) for name in SPREAD]


def draw_history(runs: Sequence[RunRows]) -> Figure | None:
    """Draw checkpoints, restarts and faults over the steps, with one row per run.

    Return None if there are none.
    """
    steps = [step for run in runs for step in _steps(run)]
    x = find_axis([0, *map(float, steps)])
    if x is None or not any(
        (run.commits, run.faults, len(run.goodput.attempts) > 1) for run in runs
    ):
        return None
    height = len(runs) * ROW + 44
    frame = Frame(x=x, y=Axis(0, 1), width=WIDTH, height=height, left=SIDE, right=SIDE)
    paths, marks, words = [frame.x_axis()], [], frame.x_labels("step")
    for row, run in enumerate(runs):
        middle = row * ROW + 30.0
        if len(runs) > 1:
            words.append(Words(x=LEFT, y=middle - 14, text=cut(run.name, 56), style="title"))
        paths.append(Path(d=f"M{SIDE} {middle}H{WIDTH - SIDE}", style="grid"))
        events = [(each.step, COMMITTED, "checkpoint") for each in run.commits]
        events += [
            (each.first_step - 1, BEGAN, f"attempt {each.generation} started")
            for each in run.goodput.attempts[1:]
        ]
        events += [(each.step, FAULTED, f"{each.fault}: {each.detail}") for each in run.faults]
        marks += [
            Mark(x=frame.x_of(step), y=middle, shape=shape, tooltip=f"step {step:,}: {event}")
            for step, shape, event in events
        ]
    legend = [
        Key(style=shape, label=label, kind="mark")
        for shape, label in enumerate(("checkpoint", "fault", "restart"))
    ]
    return Figure(
        title="Checkpoints, faults and restarts",
        width=WIDTH,
        height=height,
        paths=paths,
        marks=marks,
        words=words,
        legend=legend,
    )


def _steps(run: RunRows) -> Iterator[int]:
    for records in (run.steps, run.commits, run.faults):
        yield from (each.step for each in records)
