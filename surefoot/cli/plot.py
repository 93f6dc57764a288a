"""Line plots as text without color, drawn with braille dots or with letters.

In a plot of several curves, the letter of each curve is written along its line, so that the legend
needs no color.
"""

from __future__ import annotations

import math
import shutil
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.cli.table import without_control
from surefoot.core.axis import Axis, find_axis, is_drawn, round_numbers
from surefoot.core.units import format_number

Values = Sequence[float | None]  # None leaves a gap

PANEL = 18  # least columns of a panel beside others
WIDEST = 120
NOTHING = "nothing to draw"
LETTERS = string.ascii_lowercase
_BRAILLE = 0x2800
# by column and row within a cell: Unicode's block of braille patterns
_DOTS = (
    (0x01, 0x02, 0x04, 0x40),
    (0x08, 0x10, 0x20, 0x80),
)


@dataclass(frozen=True, kw_only=True)
class Style:
    """Settings of a plot.

    `width` and `height` are in characters. `log` selects a logarithmic y axis, `braille` selects
    braille dots instead of letters.
    """

    width: int = 80
    height: int = 16
    log: bool = False
    braille: bool = True
    x_title: str = ""


def terminal_style(
    encoding: str | None, *, log: bool = False, x_title: str = "", height: int = 16
) -> Style:
    """Return a style as wide as the terminal, at most 120 columns (80 in a pipe).

    Plots use letters if the encoding cannot represent braille dots.
    """
    try:
        "\u28ff─┤".encode(encoding or "ascii")
        braille = True
    except (UnicodeEncodeError, LookupError):
        braille = False
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    return Style(width=width, height=height, log=log, braille=braille, x_title=x_title)


def overlay(x: Sequence[float], curves: Mapping[str, Values], style: Style) -> str:
    """Plot all curves in the same axes, with a legend below; return the text.

    `x` must be ascending, and each curve has one value per x.

    >>> curves = {"down": [1, 0.5, 0], "up": [0, 0.5, 1]}
    >>> print(overlay([0, 1, 2], curves, Style(width=22, height=5, braille=False)))
    1 +aaa             bbb
      |   aaaa     bbbb
      |       babab
      |   bbbb     aaaa
    0 +bbb             aaa
      ++-----------------+
       0                 2
       a down   b up
    """
    axis = _axis(curves, style)
    if axis is None:
        return NOTHING
    labels = _tick_labels(axis, style.height)
    margin = max(map(len, labels))
    canvas = _Canvas(max(style.width - margin - 2, 8), style.height, style.braille)
    letters = LETTERS if len(curves) > 1 else "*"
    for index, values in enumerate(curves.values()):
        canvas.line(_points(x, values, axis, canvas), letters[index % len(letters)])
    if len(curves) > 1 and style.braille:
        canvas.write_letters(len(curves))
    lines = _add_frame(canvas, labels, style.braille)
    lines += _x_axis(x, canvas.columns, margin, style)
    if len(curves) > 1:
        legend = [
            f"{LETTERS[index % 26]} {without_control(name)}" for index, name in enumerate(curves)
        ]
        lines += _wrap_legend(legend, margin + 2, style.width)
    return "\n".join(line.rstrip() for line in [*lines, *_notes(curves, axis)])


def side_by_side(x: Sequence[float], curves: Mapping[str, Values], style: Style) -> str:
    """Plot each curve in a separate panel, with its name above; return the text.

    All panels have the same axes. As many panels as fit are placed in one row.
    """
    axis = _axis(curves, style)
    if axis is None:
        return NOTHING
    labels = _tick_labels(axis, style.height)
    margin = max(map(len, labels))
    in_row = max(1, min(len(curves), (style.width - margin) // PANEL))
    # if three fit in a row, four are arranged two by two
    in_row = math.ceil(len(curves) / math.ceil(len(curves) / in_row))
    columns = (style.width - margin) // in_row - 2
    blocks: list[str] = []
    names = list(curves)
    for start in range(0, len(names), in_row):
        panels: list[list[str]] = []
        for name in names[start : start + in_row]:
            canvas = _Canvas(max(columns, 8), style.height, style.braille)
            canvas.line(_points(x, curves[name], axis, canvas), "*")
            shown = labels if not panels else [""] * style.height
            left = margin if not panels else 0
            title = f"{'':{left}}  {without_control(name)[: canvas.columns]}"
            panel = [
                title,
                *_add_frame(canvas, shown, style.braille, left),
                *_x_axis(x, canvas.columns, left, style),
            ]
            panels.append([line.ljust(left + 2 + canvas.columns) for line in panel])
        blocks += ["".join(parts).rstrip() for parts in zip(*panels, strict=True)]
    return "\n".join([*blocks, *_notes(curves, axis)])


class _Canvas:
    """Grid of characters on which lines are drawn.

    Coordinates are counted in dots. A character has 2 by 4 dots with braille, and 1 dot without.
    """

    def __init__(self, columns: int, rows: int, braille: bool) -> None:
        self.columns, self.rows, self._braille = columns, rows, braille
        self.dots = (columns * 2, rows * 4) if braille else (columns, rows)
        self._cells: dict[tuple[int, int], int] = {}
        self._letters: dict[tuple[int, int], list[str]] = {}
        self._paths: list[dict[int, int]] = []

    def line(self, points: Sequence[tuple[int, int] | None], letter: str) -> None:
        """Draw a line through the points; a point that is None leaves a gap.

        A point is a column and a row, in dots from the top left.
        """
        path: dict[int, int] = {}
        before = None
        for point in points:
            if point is not None:
                for column, row in _line_dots(before or point, point):
                    self._set(column, row, letter, path)
            before = point
        self._paths.append(path)

    def _set(self, column: int, row: int, letter: str, path: dict[int, int]) -> None:
        if self._braille:
            cell = column // 2, row // 4
            self._cells[cell] = self._cells.get(cell, 0) | _DOTS[column % 2][row % 4]
        else:
            cell = column, row
            self._letters.setdefault(cell, []).append(letter)
        path.setdefault(cell[0], cell[1])

    def write_letters(self, num_curves: int) -> None:
        """Write the letter of each curve along its line, but never over a different letter."""
        repeats = max(1, self.columns // (6 * num_curves))
        for index, path in enumerate(self._paths):
            for turn in range(repeats):
                wanted = int((turn + (index + 0.5) / num_curves) / repeats * self.columns)
                free = [
                    column for column, row in path.items() if (column, row) not in self._letters
                ]
                if free:
                    column = min(free, key=lambda each: abs(each - wanted))
                    self._letters[column, path[column]] = [LETTERS[index % 26]]

    def text(self, row: int) -> str:
        return "".join(self._character(column, row) for column in range(self.columns))

    def _character(self, column: int, row: int) -> str:
        if letters := sorted(set(self._letters.get((column, row), ()))):
            return letters[column % len(letters)]  # letters of coinciding curves alternate
        return chr(_BRAILLE + dots) if (dots := self._cells.get((column, row), 0)) else " "


def _line_dots(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a straight line, including both ends."""
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            round(start[0] + (end[0] - start[0]) * part / count),
            round(start[1] + (end[1] - start[1]) * part / count),
        )
        for part in range(count + 1)
    ]


def _points(
    x: Sequence[float], values: Values, axis: Axis, canvas: _Canvas
) -> list[tuple[int, int] | None]:
    columns, rows = canvas.dots
    first, span = x[0], (x[-1] - x[0]) or 1.0
    shares = [
        None if not is_drawn(value) else axis.share(value) if value >= axis.low else -1.0
        for value in values
    ]
    points: list[tuple[int, int] | None] = []
    for index, (at, share) in enumerate(zip(x, shares, strict=True)):
        beside = [
            each
            for each in (*shares[max(index - 1, 0) : index], *shares[index + 1 : index + 2])
            if each is not None
        ]
        if share is None or (share < 0 and max(beside, default=-1.0) < 0):
            points.append(None)
        else:  # a curve that leaves the axis is drawn down to its edge
            points.append(
                (
                    round((at - first) / span * (columns - 1)),
                    round((1 - max(share, 0.0)) * (rows - 1)),
                )
            )
    return points


def _axis(curves: Mapping[str, Values], style: Style) -> Axis | None:
    return find_axis((value for values in curves.values() for value in values), log=style.log)


def _tick_labels(axis: Axis, height: int) -> list[str]:
    """Return the y-axis label of each row of the plot; "" for a row without a tick."""
    labels = [""] * height
    for value in axis.ticks(max(2, (height - 1) // 3 + 1)):
        labels[round((1 - axis.share(value)) * (height - 1))] = format_number(value)
    return labels


def _add_frame(
    canvas: _Canvas, labels: Sequence[str], braille: bool, margin: int | None = None
) -> list[str]:
    width = max(map(len, labels)) if margin is None else margin
    tick, bare = ("┤", "│") if braille else ("+", "|")
    return [
        f"{label:>{width}} {tick if label else bare}{canvas.text(row)}"
        for row, label in enumerate(labels)
    ]


def _x_axis(x: Sequence[float], columns: int, margin: int, style: Style) -> list[str]:
    """Return the text lines of the x axis: the axis with ticks, the tick labels, and the title."""
    corner, dash, tick = ("└", "─", "┬") if style.braille else ("+", "-", "+")
    line, numbers = [dash] * columns, [" "] * columns
    span = (x[-1] - x[0]) or 1.0
    end = 0
    for value in round_numbers(x[0], x[0] + span, max(2, columns // 14)):
        column, text = round((value - x[0]) / span * (columns - 1)), format_number(value)
        line[column] = tick
        start = min(max(column - len(text) // 2, 0), columns - len(text))
        if start >= end:
            numbers[start : start + len(text)] = text
            end = start + len(text) + 1
    lines = [f"{'':{margin}} {corner}{''.join(line)}", f"{'':{margin}}  {''.join(numbers)}"]
    return [*lines, f"{'':{margin}}  {style.x_title:^{columns}}"] if style.x_title else lines


def _wrap_legend(parts: Sequence[str], indent: int, width: int) -> list[str]:
    """Return the lines of the legend, each with as many entries as fit into `width` characters."""
    lines = [" " * indent]
    for part in parts:
        if len(lines[-1]) > indent and len(lines[-1]) + len(part) + 3 > width:
            lines.append(" " * indent)
        lines[-1] += part if len(lines[-1]) == indent else f"   {part}"
    return lines


def _notes(curves: Mapping[str, Values], axis: Axis) -> list[str]:
    """Return a note for each kind of value that the plot does not show."""
    drawn = [value for values in curves.values() for value in values if value is not None]
    notes = []
    if any(value < axis.low for value in drawn):
        notes.append(f"below {format_number(axis.low)} the axis is cut")
    if not all(map(is_drawn, drawn)):
        notes.append("values that are not finite are left out")
    return notes
