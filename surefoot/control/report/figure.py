"""Figures, as shapes and texts with coordinates.

The HTML templates write them as SVG and escape all text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from surefoot.core.axis import Axis
from surefoot.core.units import format_number

NUM_STYLES = 8  # colors, dashes and markers that page.css and parts.html define
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Point = tuple[float, float | None]  # None is a gap


class Whole(str):
    """Text that is never truncated, such as a command to copy, SVG path data or an image."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Path:
    """Line or area of a figure; `d` is SVG path data, `style` a class of page.css."""

    d: str
    style: str

    @property
    def data(self) -> Whole:
        return Whole(self.d)


@dataclass(frozen=True, kw_only=True)
class Box:
    """Rectangle of a figure, in pixels; `style` is a class of page.css."""

    x: float
    y: float
    width: float
    height: float
    style: str
    tooltip: str = ""


@dataclass(frozen=True, kw_only=True)
class Words:
    """Text of a figure; the point (`x`, `y`) is at its `anchor`: start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    style: str = ""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Marker of a figure; `shape` is the index of its form in parts.html.

    The forms differ, so that no meaning depends on color alone.
    """

    x: float
    y: float
    shape: int
    tooltip: str = ""


@dataclass(frozen=True, kw_only=True)
class Key:
    """Legend entry; `kind` is "line" or "mark", and `style` the index of its line or marker."""

    style: int
    label: str
    kind: str = "line"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Drawing of `width` by `height` pixels with a title, and a legend and a note below it."""

    title: str
    width: float
    height: float
    paths: Sequence[Path] = ()
    boxes: Sequence[Box] = ()
    marks: Sequence[Mark] = ()
    words: Sequence[Words] = ()
    legend: Sequence[Key] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Axes of a figure and the margins around them, in pixels."""

    x: Axis
    y: Axis
    width: float = 460
    height: float = 250
    left: float = 58
    right: float = 14
    top: float = 26
    bottom: float = 40

    def x_of(self, value: float) -> float:
        return self.left + self.x.share(value) * (self.width - self.left - self.right)

    def y_of(self, value: float) -> float:
        """Return the y coordinate of a value in pixels; outside of the axis, that of its edge."""
        share = (
            0.0 if self.y.log and value <= self.y.low else min(max(self.y.share(value), 0.0), 1.0)
        )
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)

    def grid(self) -> list[Path]:
        """Return the two axes, and a thin horizontal line at each tick of the y axis."""
        left, right, bottom = self.left, self.width - self.right, self.height - self.bottom
        rows = "".join(
            f"M{left:.1f} {self.y_of(value):.1f}H{right:.1f}" for value in self.y.ticks(5)
        )
        return [
            Path(d=rows, style="grid"),
            Path(d=f"M{left} {self.top}V{bottom}", style="axis"),
            self.x_axis(),
        ]

    def x_axis(self) -> Path:
        """Return the x axis with its ticks."""
        right, bottom = self.width - self.right, self.height - self.bottom
        ticks = "".join(f"M{self.x_of(value):.1f} {bottom:.1f}v4" for value in self.x.ticks(5))
        return Path(d=f"M{self.left} {bottom}H{right}{ticks}", style="axis")

    def x_labels(self, title: str) -> list[Words]:
        """Return the tick labels and the title of the x axis."""
        y, right = self.height - self.bottom + 17, self.width - self.right
        return [
            *(
                Words(x=self.x_of(value), y=y, text=format_number(value), anchor="middle")
                for value in self.x.ticks(5)
            ),
            Words(x=right, y=self.height - 6, text=title, anchor="end", style="title"),
        ]

    def labels(self, x_title: str, y_title: str) -> list[Words]:
        """Return the tick labels and the titles of both axes."""
        rows = [
            Words(x=self.left - 6, y=self.y_of(value) + 4, text=format_number(value), anchor="end")
            for value in self.y.ticks(5)
        ]
        return [*rows, *self.x_labels(x_title), Words(x=2, y=13, text=y_title, style="title")]

    def line(self, points: Iterable[Point]) -> str:
        """Return the SVG path data of a line through the points; non-finite values leave gaps.

        A point between two gaps is drawn as a dot. Points that would not be visible are left out
        (`thin_points`).
        """
        parts: list[str] = []
        is_open = False
        for x, y in thin_points(points, int(self.width - self.left - self.right)):
            if y is None or not math.isfinite(y):
                is_open = False
                continue
            place = f"{self.x_of(x):.1f} {self.y_of(y):.1f}"
            parts.append(f"L{place}" if is_open else f"M{place}h0")
            is_open = True
        return "".join(parts)


def thin_points(points: Iterable[Point], columns: int) -> list[Point]:
    """Reduce points to those that are visible in a drawing of `columns` columns.

    In each column, the first, smallest, largest and last point remain, so the drawing looks the
    same.

    >>> thin_points([(step, step % 7) for step in range(1000)], 2)[:3]
    [(0, 0), (496, 6), (499, 2)]
    """
    every = list(points)
    if len(every) <= 4 * columns:
        return every
    first, span = every[0][0], (every[-1][0] - every[0][0]) or 1.0
    kept: dict[int, list[int]] = {}
    for index, (x, _) in enumerate(every):
        kept.setdefault(min(int((x - first) / span * columns), columns - 1), []).append(index)
    chosen: set[int] = set()
    for part in kept.values():
        drawn = [index for index in part if (y := every[index][1]) is not None and math.isfinite(y)]
        ranked = sorted(drawn, key=lambda index: every[index][1] or 0.0)
        chosen |= {*ranked[:1], *ranked[-1:], *part[:1], *part[-1:]}
    return [every[index] for index in sorted(chosen)]


def cut(text: str, length: int) -> str:
    """Return `text` truncated to `length` characters; truncated text ends with an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
