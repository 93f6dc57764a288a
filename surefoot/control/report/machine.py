"""Figures and tables of a profile: roofline, operators, memory by category over time."""

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
NUM_NAMED = 5  # points whose names are written into the drawing
DECADES = 6
MIB, GIGA = 1 << 20, 1e9
LETTER = 6.5  # approximate width of a character in pixels
KINDS = ("module", "operator")


def draw_roofline(found: Roofline) -> Figure | None:
    """Draw FLOP/s over FLOPs per byte, both logarithmic, below the roof of each dtype."""
    places = [
        (place, x, y)
        for place in found.places
        for x, y in [_stand(place)]
        if x is not None and y is not None
    ]
    peaks = {name: peak for name, peak in found.flops_per_s.items() if 0 < peak < 1e30}
    width = found.bytes_per_s if found.bytes_per_s and 0 < found.bytes_per_s < 1e30 else None
    ridges = [peak / width for peak in peaks.values()] if width else []
    x = find_axis(
        [
            *(each[1] for each in places),
            *(ridge * 10 for ridge in ridges),
            *(ridge / 30 for ridge in ridges),
        ],
        log=True,
        decades=DECADES,
    )
    y = find_axis(
        [*(each[2] for each in places), *peaks.values(), *([width * x.low] if width and x else [])],
        log=True,
        decades=DECADES,
    )
    if x is None or y is None or not x.log or not y.log:
        return None
    frame = Frame(x=x, y=y, width=460, height=320, left=58)
    places, num_below = (
        [each for each in places if each[2] >= y.low],
        sum(each[2] < y.low for each in places),
    )
    operators = [each for each in places if each[0].kind == "operator"] or places
    named = sorted(operators, key=lambda each: -(each[0].elapsed_s or 0.0))[:NUM_NAMED]
    return Figure(
        title=f"Roofline of {cut(found.device, 60)}",
        width=frame.width,
        height=frame.height,
        paths=[
            *frame.grid(),
            *(
                path
                for index, peak in enumerate(peaks.values())
                for path in _roof(frame, index, peak, width)
            ),
        ],
        marks=[
            Mark(
                x=frame.across(x),
                y=frame.up(y),
                shape=KINDS.index(place.kind) if place.kind in KINDS else 2,
                told=_tell(place),
            )
            for place, x, y in places
        ],
        words=[*_powers(frame), *_named(frame, named)],
        legend=[
            Key(style=index % NUM_STYLES, label=f"{name}, {_giga(peak)} GFLOP/s")
            for index, (name, peak) in enumerate(peaks.items())
        ]
        + [Key(style=index, label=kind, kind="mark") for index, kind in enumerate(KINDS)],
        note=f"left out: {num_below} below {_giga(y.low)} GFLOP/s" if num_below else "",
    )


def _stand(place: RooflinePoint) -> tuple[float | None, float | None]:
    """Return FLOPs per byte and FLOP/s of a point; None where a count is unknown or 0."""
    if (
        not (place.flops and place.num_bytes and place.elapsed_s)
        or min(place.flops, place.num_bytes, place.elapsed_s) <= 0
    ):
        return None, None
    return place.flops / place.num_bytes, place.flops / place.elapsed_s


def _roof(frame: Frame, index: int, peak: float, width: float | None) -> Iterator[Path]:
    """Yield min(peak, intensity * bandwidth) across the drawing."""
    right = frame.across(frame.x.high)
    if width is None:
        yield Path(
            d=f"M{frame.left:.1f} {frame.up(peak):.1f}H{right:.1f}",
            style=f"line s{index % NUM_STYLES}",
        )
        return
    ridge, start = peak / width, max(frame.x.low, frame.y.low / width)
    d = (
        f"M{frame.across(start):.1f} {frame.up(start * width):.1f}"
        f"L{frame.across(ridge):.1f} {frame.up(peak):.1f}H{right:.1f}"
    )
    yield Path(d=d, style=f"line s{index % NUM_STYLES}")


def _named(frame: Frame, places: Sequence[tuple[RooflinePoint, float, float]]) -> Iterator[Words]:
    """Yield names beside their markers; a name that would overlap another is left out."""
    taken: list[tuple[float, float, float]] = []
    for place, x, y in places:
        across, up = frame.across(x), frame.up(y)
        text, is_right = cut(place.name, 22), across > frame.width * 0.6
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


def _powers(frame: Frame) -> Iterator[Words]:
    """Yield the tick labels of both logarithmic axes."""
    bottom = frame.height - frame.bottom
    for value in frame.x.ticks(0):
        yield Words(x=frame.across(value), y=bottom + 17, text=f"{value:g}", anchor="middle")
    for value in frame.y.ticks(0):
        yield Words(x=frame.left - 6, y=frame.up(value) + 4, text=_giga(value), anchor="end")
    yield Words(x=2, y=13, text="GFLOP/s (log)", style="title")
    yield Words(
        x=frame.width - frame.right,
        y=frame.height - 6,
        text="FLOP a byte (log)",
        anchor="end",
        style="title",
    )


def _tell(place: RooflinePoint) -> str:
    x, y = _stand(place)
    return (
        f"{place.name}: {format_count(x)} FLOP a byte, {_giga(y)} GFLOP/s, "
        f"{format_seconds(place.elapsed_s)}"
    )


def table_of_places(found: Roofline) -> TableRows | None:
    """Return a table of the modules and operators that took longest, with what bounds each."""
    ranked = sorted(found.places, key=lambda place: -(place.elapsed_s or 0.0))[:MAX_ROWS]
    headers = (
        "where",
        "kind",
        "calls",
        "time",
        "FLOPs",
        "bytes",
        "FLOP a byte",
        "GFLOP/s",
        "bound by",
    )
    rows = []
    for place in ranked:
        intensity, rate = _stand(place)
        rows.append(
            [
                place.name,
                place.kind,
                format_count(place.calls),
                format_seconds(place.elapsed_s),
                format_flops(place.flops),
                format_bytes(place.num_bytes),
                format_count(intensity),
                _giga(rate),
                place.bound or UNKNOWN,
            ]
        )
    return (
        TableRows(
            headers=headers,
            rows=rows,
            right=headers[2:8],
            caption=_of(len(ranked), len(found.places), "places"),
        )
        if rows
        else None
    )


def _giga(value: float | None) -> str:
    return format_number(None if value is None else value / GIGA)


def tell_roofline(found: Roofline) -> list[tuple[str, str]]:
    """Return the peaks of the device and the utilization of the step, in words."""
    peaks = ", ".join(f"{name} {_giga(peak)} GFLOP/s" for name, peak in found.flops_per_s.items())
    width = UNKNOWN if found.bytes_per_s is None else f"{format_bytes(found.bytes_per_s)}/s"
    return [
        ("device", found.device),
        ("peaks", peaks or UNKNOWN),
        ("memory", width),
        ("model FLOPs utilisation", found.mfu_formula or format_percent(found.mfu)),
        ("time in operators that fusion would help", format_percent(found.fusible_share)),
    ]


def table_of_operators(profile: Profile) -> TableRows | None:
    """Return a table of the operators with the largest self time."""
    ranked = sorted(profile.operators, key=lambda each: -(each.self_s or 0.0))[:MAX_ROWS]
    headers = ("operator", "calls", "self time", "share", "total time", "own memory", "FLOPs")
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
    """Draw the memory categories stacked over time, each with a letter, and a table of the peak.

    The table lists the bytes of each category when their sum is largest.
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
    paths: list[Path] = []
    words: list[Words] = []
    below = [0.0] * count
    for index, (name, values) in enumerate(layers.items()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        paths.append(
            Path(d=_area(frame, memory.times_s, below, above), style=f"f{index % NUM_STYLES}")
        )
        thickest = max(range(count), key=lambda at: values[at])
        if values[thickest] / top * frame.height > 20:
            middle = (below[thickest] + above[thickest]) / 2 / MIB
            place = min(
                max(frame.across(memory.times_s[thickest]), frame.left + 10),
                frame.width - frame.right - 10,
            )
            words.append(
                Words(
                    x=place,
                    y=frame.up(middle) + 4,
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


def _area(
    frame: Frame, times: Sequence[float], below: Sequence[float], above: Sequence[float]
) -> str:
    """Return the path along the upper edge and back along the lower one, thinned to be short."""
    stride = max(1, len(times) // 800)
    chosen = sorted({*range(0, len(times), stride), len(times) - 1})
    edge = [f"{frame.across(times[at]):.1f} {frame.up(above[at] / MIB):.1f}" for at in chosen]
    back = [
        f"{frame.across(times[at]):.1f} {frame.up(below[at] / MIB):.1f}" for at in reversed(chosen)
    ]
    return "M" + "L".join([*edge, *back]) + "Z"
