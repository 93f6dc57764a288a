"""Draws curves as text: rows in, one string out. Braille dots where the terminal has them, letters elsewhere; no colour.

Each curve of an overlay carries its letter along the line, so that the legend needs no colour to be read.
"""

from __future__ import annotations

import math
import shutil
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from surefoot.core.units import format_number

Values = Sequence[float | None]  # None leaves a gap

DECADES = 5  # of a log axis, at most: a cosine that ends at 1e-12 of its peak would flatten all else
PANEL = 22  # columns of a panel side by side, at least
WIDEST = 120
LETTERS = string.ascii_lowercase
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column and row within a cell: Unicode's block of braille patterns


@dataclass(frozen=True, kw_only=True)
class Style:
    """How to draw: columns and rows of text in all, a log axis or not, braille or letters, what the x axis counts."""

    width: int = 80
    height: int = 16
    log: bool = False
    braille: bool = True
    x_title: str = ""


def terminal_style(encoding: str | None, *, log: bool = False, x_title: str = "", height: int = 16) -> Style:
    """As wide as the terminal, 120 columns at most (80 in a pipe); letters where `encoding` has no braille."""
    try:
        "\u28ff─┤".encode(encoding or "ascii")
        braille = True
    except (UnicodeEncodeError, LookupError):
        braille = False
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    return Style(width=width, height=height, log=log, braille=braille, x_title=x_title)


def overlay(x: Sequence[float], curves: Mapping[str, Values], style: Style) -> str:
    """All curves over one pair of axes, a letter along each, and the legend below. `x` rises; each curve has a value for each x."""
    axis = _axis(curves, style)
    labels = _tick_labels(axis, style.height)
    margin = max(map(len, labels))
    canvas = _Canvas(max(style.width - margin - 2, 8), style.height, style.braille)
    letters = LETTERS if len(curves) > 1 or not style.braille else ""
    for index, values in enumerate(curves.values()):
        canvas.line(_points(x, values, axis, canvas), letters[index % 26] if letters else "")
    if letters and style.braille:
        canvas.write_letters(len(curves))
    lines = _framed(canvas, labels, style.braille)
    lines += _x_axis(x, canvas.columns, margin, style)
    if len(curves) > 1:
        lines += _wrapped([f"{LETTERS[index % 26]} {name}" for index, name in enumerate(curves)], margin + 2, style.width)
    return "\n".join(line.rstrip() for line in [*lines, *_notes(curves, axis)])


def side_by_side(x: Sequence[float], curves: Mapping[str, Values], style: Style) -> str:
    """A panel for each curve, its name above it, all with the same axes; as many in a row as there is room for."""
    axis = _axis(curves, style)
    labels = _tick_labels(axis, style.height)
    margin = max(map(len, labels))
    in_row = max(1, min(len(curves), (style.width - margin) // PANEL))
    columns = (style.width - margin) // in_row - 2
    blocks: list[str] = []
    names = list(curves)
    for start in range(0, len(names), in_row):
        panels = []
        for name in names[start : start + in_row]:
            canvas = _Canvas(max(columns, 8), style.height, style.braille)
            canvas.line(_points(x, curves[name], axis, canvas), "" if style.braille else "*")
            shown = labels if not panels else [""] * style.height
            left = margin if not panels else 0
            title = f"{'':{left}}  {name[: canvas.columns]}"
            panel = [title, *_framed(canvas, shown, style.braille, left), *_x_axis(x, canvas.columns, left, style)]
            panels.append([line.ljust(left + 2 + canvas.columns) for line in panel])
        blocks += ["".join(parts).rstrip() for parts in zip(*panels, strict=True)]
    return "\n".join([*blocks, *_notes(curves, axis)])


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool

    def share(self, value: float) -> float:
        """0 at the bottom, 1 at the top."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        if not self.log:
            return _nice(self.low, self.high, most)
        decades = range(round(math.log10(self.low)), math.floor(math.log10(self.high) + 1e-9) + 1)
        return [10.0**decade for decade in decades]


class _Canvas:
    """A grid of characters; points lie in dots, 2 by 4 in a braille cell, one in a letter."""

    def __init__(self, columns: int, rows: int, braille: bool) -> None:
        self.columns, self.rows, self._braille = columns, rows, braille
        self.dots = (columns * 2, rows * 4) if braille else (columns, rows)
        self._cells: dict[tuple[int, int], int] = {}
        self._letters: dict[tuple[int, int], str] = {}
        self._paths: list[dict[int, int]] = []

    def line(self, points: Sequence[tuple[int, int] | None], letter: str) -> None:
        """Join the points (column and row of dots, from the top left); None is a gap."""
        path: dict[int, int] = {}
        before = None
        for point in points:
            if point is not None:
                for column, row in _between(before or point, point):
                    self._set(column, row, letter, path)
            before = point
        self._paths.append(path)

    def _set(self, column: int, row: int, letter: str, path: dict[int, int]) -> None:
        if self._braille:
            cell = column // 2, row // 4
            self._cells[cell] = self._cells.get(cell, 0) | _DOTS[column % 2][row % 4]
        else:
            cell = column, row
            self._letters.setdefault(cell, letter)
        path.setdefault(cell[0], cell[1])

    def write_letters(self, num_curves: int) -> None:
        """Put each curve's letter on its line, at places that no other curve's letter takes."""
        repeats = max(1, self.columns // (12 * num_curves))
        for index, path in enumerate(self._paths):
            for turn in range(repeats):
                wanted = int((turn + (index + 0.5) / num_curves) / repeats * self.columns)
                free = [column for column, row in path.items() if (column, row) not in self._letters]
                if free:
                    column = min(free, key=lambda each: abs(each - wanted))
                    self._letters[column, path[column]] = LETTERS[index % 26]

    def text(self, row: int) -> str:
        cells = ((column, row) for column in range(self.columns))
        return "".join(self._letters.get(cell) or (chr(_BRAILLE + self._cells[cell]) if cell in self._cells else " ") for cell in cells)


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line, its ends included."""
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * part / count), round(start[1] + (end[1] - start[1]) * part / count))
        for part in range(count + 1)
    ]


def _points(x: Sequence[float], values: Values, axis: _Axis, canvas: _Canvas) -> list[tuple[int, int] | None]:
    columns, rows = canvas.dots
    first, span = x[0], (x[-1] - x[0]) or 1.0
    return [
        (round((at - first) / span * (columns - 1)), round((1 - axis.share(value)) * (rows - 1))) if _is_drawn(value, axis) else None
        for at, value in zip(x, values, strict=True)
        if value is None or value == value
    ]
