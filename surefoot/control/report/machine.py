"""Figures and tables of a profile: roofline, operators, and memory by category over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from surefoot.control.report.figure import (
    LETTERS,
    NUM_STYLES,
    Figure,
    Frame,
    Key,
    Mark,
    Path,
    Words,
    cut,
)
from surefoot.control.report.rows import MemoryRows, Profile, Roofline, RooflinePoint, TableRows
from surefoot.core.axis import Axis, find_axis
from surefoot.core.cost.roofline import format_giga
from surefoot.core.units import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_flops,
    format_number,
    format_percent,
    format_seconds,
)

MAX_ROWS = 15
MAX_COLUMNS = 400  # of the memory plot, which is 388 pixels wide
NUM_NAMED = 5  # points whose names are written into the drawing
DECADES = 6
MIB, GIGA = 1 << 20, 1e9
LETTER = 6.5  # approximate width of a character in pixels
KINDS = ("module", "operator")


def draw_roofline(found: Roofline) -> Figure | None:
    """Draw the operators and modules of a step as points below the roof of each dtype.

    The axes are FLOPs per byte and GFLOP/s, both logarithmic. Return None if there is nothing to
    draw.
    """
    points = [
        (each, intensity, rate)
        for each in found.points
        for intensity, rate in [_position(each)]
        if intensity is not None and rate is not None
    ]
    roofs = {name: peak / GIGA for name, peak in found.flops_per_s.items() if 0 < peak < 1e30}
    bytes_per_s = found.bytes_per_s or 0.0
    bandwidth = bytes_per_s / GIGA if 0 < bytes_per_s < 1e30 else None
    frame = _find_frame(points, list(roofs.values()), bandwidth)
    if frame is None:
        return None
    shown = [each for each in points if each[2] >= frame.y.low]
    operators = [each for each in shown if each[0].kind == "operator"] or shown
    named = sorted(operators, key=lambda each: -(each[0].elapsed_s or 0.0))[:NUM_NAMED]
    num_below = len(points) - len(shown)
    return Figure(
        title=f"Roofline of {cut(found.device, 60)}",
        width=frame.width,
        height=frame.height,
        paths=[
            *frame.grid(),
            *(
                Path(d=_roof(frame, peak, bandwidth), style=f"line s{index % NUM_STYLES}")
                for index, peak in enumerate(roofs.values())
            ),
        ],
        marks=[
            Mark(
                x=frame.x_of(intensity),
                y=frame.y_of(rate),
                shape=KINDS.index(each.kind) if each.kind in KINDS else 2,
                tooltip=_describe_point(each),
            )
            for each, intensity, rate in shown
        ],
        words=[*frame.labels("FLOP per byte (log)", "GFLOP/s (log)"), *_label_points(frame, named)],
        legend=[
            Key(style=index % NUM_STYLES, label=f"{name}, {format_number(peak)} GFLOP/s")
            for index, (name, peak) in enumerate(roofs.items())
        ]
        + [Key(style=index, label=kind, kind="mark") for index, kind in enumerate(KINDS)],
        note=f"left out: {num_below} below {format_number(frame.y.low)} GFLOP/s"
        if num_below
        else "",
    )


def _position(point: RooflinePoint) -> tuple[float | None, float | None]:
    """Return FLOPs per byte and GFLOP/s of a point; (None, None) if a count is unknown or 0."""
    counts = [point.flops or 0.0, point.num_bytes or 0.0, point.elapsed_s or 0.0]
    if min(counts) <= 0:
        return None, None
    flops, num_bytes, elapsed_s = counts
    return flops / num_bytes, flops / elapsed_s / GIGA


def _find_frame(
    points: Sequence[tuple[RooflinePoint, float, float]],
    peaks: Sequence[float],
    bandwidth: float | None,
) -> Frame | None:
    """Return axes that include the points, the roofs and the ridges; None if there are none.

    `peaks` are in GFLOP/s and `bandwidth` in GB/s.
    """
    ridges = [peak / bandwidth for peak in peaks] if bandwidth else []
    around = [ridge * factor for ridge in ridges for factor in (1 / 30, 10)]
    x = find_axis([*(each[1] for each in points), *around], log=True, decades=DECADES)
    if x is None or not x.log:
        return None
    lowest = [bandwidth * x.low] if bandwidth else []
    y = find_axis([*(each[2] for each in points), *peaks, *lowest], log=True, decades=DECADES)
    return Frame(x=x, y=y, width=460, height=320) if y is not None and y.log else None


def _roof(frame: Frame, peak: float, bandwidth: float | None) -> str:
    """Return the SVG path of the roof: min(peak, intensity * bandwidth), in GFLOP/s."""
    if bandwidth is None:
        return frame.line([(frame.x.low, peak), (frame.x.high, peak)])
    start = max(frame.x.low, frame.y.low / bandwidth)
    corners = [(start, start * bandwidth), (peak / bandwidth, peak), (frame.x.high, peak)]
    return frame.line(corners)


def _label_points(
    frame: Frame, points: Sequence[tuple[RooflinePoint, float, float]]
) -> Iterator[Words]:
    """Yield the names of points beside their markers; a name that would overlap is left out."""
    taken: list[tuple[float, float, float]] = []
    for point, intensity, rate in points:
        across, up = frame.x_of(intensity), frame.y_of(rate)
        text, is_right = cut(point.name, 22), across > frame.width * 0.6
        first = across - 8 - LETTER * len(text) if is_right else across + 8
        last = first + LETTER * len(text)
        if all(
            last < start or first > end or abs(up - height) > 13 for start, end, height in taken
        ):
            taken.append((first, last, up))
            yield Words(
                x=last if is_right else first,
                y=up + 4,
                text=text,
                anchor="end" if is_right else "start",
                style="named",
            )


def _describe_point(point: RooflinePoint) -> str:
    intensity, rate = _position(point)
    return (
        f"{point.name}: {format_count(intensity)} FLOP per byte, {format_number(rate)} GFLOP/s, "
        f"{format_seconds(point.elapsed_s)}"
    )


def table_of_points(found: Roofline) -> TableRows | None:
    """Return a table of the operators and modules that took longest, and what limits them."""
    ranked = sorted(found.points, key=lambda each: -(each.elapsed_s or 0.0))[:MAX_ROWS]
    headers = (
        "operator or module",
        "kind",
        "calls",
        "time",
        "FLOPs",
        "bytes",
        "FLOP per byte",
        "GFLOP/s",
        "limited by",
    )
    rows = [
        [
            each.name,
            each.kind,
            format_count(each.calls),
            format_seconds(each.elapsed_s),
            format_flops(each.flops),
            format_bytes(each.num_bytes),
            format_count(intensity),
            format_number(rate),
            each.bound or UNKNOWN,
        ]
        for each in ranked
        for intensity, rate in [_position(each)]
    ]
    return (
        TableRows(
            headers=headers,
            rows=rows,
            right=headers[2:8],
            caption=_of(len(ranked), len(found.points), "operators and modules"),
        )
        if rows
        else None
    )


def describe_roofline(found: Roofline) -> list[tuple[str, str]]:
    """Return labeled texts: the peaks of the device, and the utilization of the step."""
    peaks = ", ".join(
        f"{name} {format_giga(peak)} GFLOP/s" for name, peak in found.flops_per_s.items()
    )
    bandwidth = UNKNOWN if found.bytes_per_s is None else f"{format_bytes(found.bytes_per_s)}/s"
    return [
        ("device", found.device),
        ("peaks", peaks or UNKNOWN),
        ("memory bandwidth", bandwidth),
        ("model FLOPs utilization", found.mfu_formula or format_percent(found.mfu)),
        ("share of the time that fusion could shorten", format_percent(found.fusible_share)),
    ]


def table_of_operators(profile: Profile) -> TableRows | None:
    """Return a table of the operators with the largest self time; None without operators."""
    ranked = sorted(profile.operators, key=lambda each: -(each.self_s or 0.0))[:MAX_ROWS]
    headers = ("operator", "calls", "self time", "share", "total time", "self memory", "FLOPs")
    total_s = math.fsum(each.self_s or 0.0 for each in profile.operators)
    rows = [
        [
            each.name,
            format_count(each.calls),
            format_seconds(each.self_s),
            format_percent(
                each.self_s / total_s if each.self_s is not None and total_s > 0 else None
            ),
            format_seconds(each.total_s),
            format_bytes(each.self_bytes),
            format_flops(each.flops),
        ]
        for each in ranked
    ]
    return (
        TableRows(
            headers=headers,
            rows=rows,
            right=headers[1:],
            caption=_of(len(ranked), len(profile.operators), "operators"),
        )
        if rows
        else None
    )


def _of(shown: int, every: int, what: str) -> str:
    return f"the first {shown} of {every:,} {what}, by time" if shown < every else ""


def draw_memory(memory: MemoryRows) -> tuple[Figure, TableRows] | None:
    """Draw memory by category as stacked areas over time; return also a table of the peak.

    The table lists the bytes of each category when their sum is largest. Return None if there is
    nothing to draw.
    """
    count = len(memory.times_s)
    layers = {
        name: [max(value or 0.0, 0.0) for value in values]
        for name, values in memory.categories.items()
        if len(values) == count
    }
    sums = [math.fsum(values[index] for values in layers.values()) for index in range(count)]
    top = max(sums, default=0.0)
    x = find_axis(memory.times_s)
    if x is None or top <= 0:
        return None
    peak = sums.index(top)
    frame = Frame(x=x, y=Axis(0.0, top / MIB), width=460, height=280, left=58)
    letters = dict(zip(layers, LETTERS, strict=False))
    stride = -(-count // MAX_COLUMNS)
    # of each column the largest sum, so that no peak is lost
    columns = [
        max(range(at, min(at + stride, count)), key=sums.__getitem__)
        for at in range(0, count, stride)
    ]
    paths: list[Path] = []
    words: list[Words] = []
    below = [0.0] * count
    for index, (name, values) in enumerate(layers.items()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        edges = [_steps(frame, memory.times_s, columns, each) for each in (above, below)]
        area = f"M{'L'.join([*edges[0], *reversed(edges[1])])}Z"
        paths.append(Path(d=area, style=f"f{index % NUM_STYLES}"))
        thickest = max(range(count), key=lambda at: values[at])
        if values[thickest] / top * frame.height > 20:
            middle = (below[thickest] + above[thickest]) / 2 / MIB
            place = min(
                max(frame.x_of(memory.times_s[thickest]), frame.left + 10),
                frame.width - frame.right - 10,
            )
            words.append(
                Words(
                    x=place,
                    y=frame.y_of(middle) + 4,
                    text=letters[name],
                    anchor="middle",
                    style="inside",
                )
            )
        below = above
    figure = Figure(
        title="Memory by category",
        width=frame.width,
        height=frame.height,
        paths=[*paths, *frame.grid()],
        words=[*words, *frame.labels("s", "MiB")],
    )
    rows = [
        [letters[name], name, format_bytes(values[peak]), format_percent(values[peak] / top)]
        for name, values in layers.items()
    ]
    rows.append(["", "all", format_bytes(top), f"at {format_seconds(memory.times_s[peak])}"])
    headers = ("", "category", "at the peak", "share")
    return figure, TableRows(
        headers=headers,
        rows=rows,
        right=headers[2:],
        swatches=[index % NUM_STYLES for index in range(len(layers))],
        is_narrow=True,
    )


def _steps(
    frame: Frame, times: Sequence[float], columns: Sequence[int], values: Sequence[float]
) -> list[str]:
    """Return the corners of a step function, in which each value holds until the next time.

    A corner is the text "x y", in pixels.
    """
    x = [f"{frame.x_of(times[at]):.1f}" for at in columns]
    y = [f"{frame.y_of(values[at] / MIB):.1f}" for at in columns]
    ends = [*x[1:], f"{frame.x_of(times[-1]):.1f}"]
    return [
        f"{place} {height}"
        for first, last, height in zip(x, ends, y, strict=True)
        for place in (first, last)
    ]
