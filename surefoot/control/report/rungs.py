"""Figure and tables of the results of `surefoot ladder`, an experiment with optimizations.

For each variant, they show the effects with intervals, whether it was kept, and why.
"""

from __future__ import annotations

from surefoot.control.report.figure import Box, Figure, Frame, Mark, Path, Words, cut
from surefoot.control.report.rows import LadderRows, Ratio, RungRow, TableRows
from surefoot.core.axis import LARGEST, Axis, find_axis
from surefoot.core.units import UNKNOWN, format_number

STANDINGS = KEPT, REJECTED, SKIPPED = "kept", "rejected", "skipped"
ROW, WIDTH, LEFT, RIGHT = 26, 460, 150, 74


def verdict(rung: RungRow) -> str:
    """Return the standing of a variant, in capitals if it was rejected; `n/a` if unknown."""
    return rung.standing.upper() if rung.standing == REJECTED else rung.standing or UNKNOWN


def format_ratio(ratio: Ratio) -> str:
    """Format a ratio with its interval, such as `0.82 (0.80 to 0.84)`; `n/a` if not measured."""
    if ratio.estimate is None:
        return UNKNOWN
    if ratio.low is None or ratio.high is None:
        return format_number(ratio.estimate)
    low, high = format_number(ratio.low), format_number(ratio.high)
    return f"{format_number(ratio.estimate)} ({low} to {high})"


def tables_of_rungs(ladder: LadderRows) -> list[TableRows]:
    """Return three tables with one row per variant: results, further ratios, and changes.

    Rejected variants are included, with the reason.
    """
    headers = ("rung", "verdict", "time", "time from the start", "memory", "score", "reason")
    rows = [
        [
            rung.name,
            verdict(rung),
            format_ratio(rung.time),
            format_ratio(rung.total_time),
            format_ratio(rung.memory),
            rung.score or UNKNOWN,
            rung.reason or UNKNOWN,
        ]
        for rung in ladder.rungs
    ]
    most = max((rung.time.n or 0 for rung in ladder.rungs), default=0)
    caption = "ratios to the rung below; less than 1 is a gain; in brackets the 95 % interval"
    table = TableRows(
        headers=headers,
        rows=rows,
        right=headers[2:5],
        caption=f"{caption}, of at most {most:.0f} pairs a rung" if most else caption,
    )
    ratios = ("rung", "throughput", "start-up", "memory from the start", "rule of thumb")
    measured = [
        [
            rung.name,
            *map(format_ratio, (rung.throughput, rung.startup, rung.total_memory)),
            rung.expected or UNKNOWN,
        ]
        for rung in ladder.rungs
    ]
    what = [
        [rung.name, rung.kind or UNKNOWN, rung.change or UNKNOWN, rung.parity or UNKNOWN]
        for rung in ladder.rungs
    ]
    return [
        table,
        TableRows(headers=ratios, rows=measured, right=ratios[1:4]),
        TableRows(headers=("rung", "kind", "change", "parity"), rows=what),
    ]


def draw_rungs(ladder: LadderRows) -> Figure | None:
    """Draw the ratio of the time of each variant to that of the variant below it.

    A vertical line marks the ratio 1. Return None if no time was measured.
    """
    drawn = [
        rung
        for rung in ladder.rungs
        if rung.time.estimate is not None and 0 < rung.time.estimate < LARGEST
    ]
    x = find_axis(
        [
            1.0,
            *(
                value
                for rung in drawn
                for value in (rung.time.estimate, rung.time.low, rung.time.high)
            ),
        ]
    )
    if x is None or not drawn:
        return None
    x = Axis(min(x.low, 0.8), max(x.high, 1.2))
    height = len(drawn) * ROW + 66
    frame = Frame(
        x=x, y=Axis(0, 1), width=WIDTH, height=height, left=LEFT, right=RIGHT, top=20, bottom=46
    )
    equal = f"M{frame.x_of(1.0):.1f} {frame.top - 8}V{height - frame.bottom}"
    marks, words, boxes = [], frame.x_labels("time ratio: left of 1 is faster"), []
    for row, rung in enumerate(drawn):
        middle, ratio = frame.top + row * ROW + ROW / 2, rung.time
        place = frame.x_of(ratio.estimate or 0.0)
        words += [
            Words(x=LEFT - 8, y=middle + 4, text=cut(rung.name, 22), anchor="end"),
            Words(x=WIDTH - RIGHT + 8, y=middle + 4, text=verdict(rung), style="title"),
        ]
        low, high = (
            frame.x_of(min(max(v, x.low), x.high)) if v is not None else place
            for v in (ratio.low, ratio.high)
        )
        boxes.append(
            Box(
                x=low,
                y=middle - 2,
                width=max(high - low, 1.0),
                height=4,
                style="interval",
                tooltip=format_ratio(ratio),
            )
        )
        marks.append(
            Mark(
                x=place,
                y=middle,
                shape=0 if rung.standing == KEPT else 1,
                tooltip=f"{rung.name}: {format_ratio(ratio)}, {rung.reason}",
            )
        )
    return Figure(
        title="Time of each rung, as a ratio to the rung below",
        width=WIDTH,
        height=height,
        paths=[frame.x_axis(), Path(d=equal, style="axis one")],
        boxes=boxes,
        marks=marks,
        words=words,
    )


def describe_ladder(ladder: LadderRows) -> list[tuple[str, str]]:
    """Return labeled texts: numbers of variants and runs, spec, device, baseline, best variant."""
    standings = [rung.standing for rung in ladder.rungs]
    return [
        (
            "rungs",
            f"{len(standings)}: "
            + ", ".join(f"{standings.count(each)} {each}" for each in STANDINGS),
        ),
        (
            "runs",
            f"{ladder.num_runs:,} of {ladder.num_samples:,} samples"
            if ladder.num_runs and ladder.num_samples
            else "",
        ),
        ("spec", ladder.spec),
        ("device", ladder.device),
        ("conditions", ladder.conditions),
        ("baseline", ladder.baseline),
        ("best", ladder.best),
    ]
