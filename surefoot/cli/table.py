"""Output of rows (a table at a terminal, aligned text in a pipe), sentences and times."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from surefoot.core.errors import StorageError
from surefoot.core.units import UNKNOWN

Rows = Sequence[Sequence[str]]
GAP = 2  # characters between two columns
PROSE = 24  # a longer cell may wrap


def print_table(
    headers: Sequence[str],
    rows: Rows,
    *,
    right: Container[str] = (),
    indent: int = 0,
    num_hidden: int = 0,
    what: str = "rows",
) -> None:
    """Print `rows` under `headers`; the columns named in `right` are right-aligned.

    At a terminal that is too narrow long cells wrap, and columns that do not fit are printed below
    the others. A line below the table says how many further rows, `what`, are in --json alone.
    """
    harmless = [[without_control(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(headers, harmless, right, indent)
    else:
        print(plain_table(headers, harmless, right=right, indent=indent))
    if num_hidden > 0:
        print_text(f"{num_hidden:,} {what} are not shown; --json has all of them", indent=indent)


def without_control(text: str) -> str:
    """Return the text on one line, without terminal control characters, which a run may contain.

    >>> without_control("red \x1b[31m, two\\nlines")
    'red ?[31m, two lines'
    """
    return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in text)


def plain_table(
    headers: Sequence[str], rows: Rows, *, right: Container[str] = (), indent: int = 0
) -> str:
    """Return the rows as aligned text, without color or lines.

    >>> print(plain_table(("run", "steps"), [("a", "5"), ("bcde", "1,000")], right=("steps",)))
    run   steps
    a         5
    bcde  1,000
    """
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]
    lines = []
    for row in (headers, *rows):
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, headers, strict=True)
        ]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _print_rich(headers: Sequence[str], rows: Rows, right: Container[str], indent: int) -> None:
    from rich.cells import cell_len
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    columns = list(zip(headers, *rows, strict=True))
    natural = [max(map(cell_len, column)) for column in columns]
    longest = [
        max(cell_len(word) for cell in column for word in cell.split() or [""])
        for column in columns
    ]
    for number, widths in enumerate(fit_columns(natural, longest, console.width - indent)):
        if number:
            print()
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for column, width in widths.items():
            table.add_column(
                headers[column],
                justify="right" if headers[column] in right else "left",
                overflow="fold",
                width=width,
            )
        for row in rows:
            # Text: a bracket in a name is no markup
            table.add_row(*(Text(row[column]) for column in widths))
        console.print(Padding(table, (0, 0, 0, indent), expand=False))


def fit_columns(natural: Sequence[int], longest: Sequence[int], room: int) -> list[dict[int, int]]:
    """Return the width of each column within `room`, for one or more tables.

    Columns that do not fit form another table, which repeats the first column. `natural` is the
    width of a column's longest cell, `longest` that of its longest word: only a word that is wider
    than a line is broken.

    >>> fit_columns([8, 50], [8, 9], 80), fit_columns([8, 90], [8, 9], 80)
    ([{0: 8, 1: 50}], [{0: 8, 1: 70}])
    >>> fit_columns([8, 22, 22, 22], [8, 7, 7, 7], 60)
    [{0: 8, 1: 22, 2: 22}, {0: 8, 3: 22}]
    """
    least = [min(width, max(word, PROSE)) for width, word in zip(natural, longest, strict=True)]
    tables: list[dict[int, int]] = [{}]
    for column, width in enumerate(least):
        widths = tables[-1]
        if len(widths) > 1 and sum(widths.values()) + width + GAP * len(widths) > room:
            widths = {0: least[0]}
            tables.append(widths)
        widths[column] = width
    for widths in tables:
        spare = room - sum(widths.values()) - GAP * (len(widths) - 1)
        for column in sorted(widths, key=lambda each: natural[each]):
            more = min(natural[column] - widths[column], max(spare, 0))
            widths[column] += more
            spare -= more
        for _ in range(-spare):  # one or two columns that still do not fit
            widths[max(widths, key=widths.__getitem__)] -= 1
    return tables


def print_pairs(pairs: Sequence[tuple[str, str]], *, whole: bool = False) -> None:
    """Print names and values, a pair per line; an empty name continues the line above.

    At a terminal a long value wraps with an indent, unless `whole` keeps it on one line, for
    example for a command to copy.
    """
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        lines = [without_control(value)] if whole else _wrap(value, taken=width + 4)
        for number, line in enumerate(lines):
            print(f"  {name if not number else '':<{width}}  {line}")


def print_text(text: str, *, indent: int = 0) -> None:
    """Print a sentence; at a terminal it wraps between words."""
    for line in _wrap(text, taken=indent):
        print(" " * indent + line)


def _wrap(text: str, *, taken: int) -> list[str]:
    """Return the lines of `text` at a terminal with `taken` columns in use; one line in a pipe."""
    room = shutil.get_terminal_size().columns - taken if sys.stdout.isatty() else sys.maxsize
    return textwrap.wrap(without_control(text), max(room, 20), break_on_hyphens=False) or [""]


def write_csv(path: Path, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write the rows under their headers to a new CSV file; None becomes an empty cell."""
    import csv

    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([headers, *rows])
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", hint="give another file with --csv"
        ) from None


def format_time(time_s: float | None) -> str:
    """Format seconds since 1970 as local date and time; for another year as the date alone."""
    if time_s is None:
        return UNKNOWN
    try:
        there, now = time.localtime(time_s), time.localtime()
    except (OverflowError, ValueError, OSError):  # a foreign log may hold any number
        return UNKNOWN
    return time.strftime("%m-%d %H:%M" if there.tm_year == now.tm_year else "%Y-%m-%d", there)


def format_utc(time_s: float) -> str:
    """Format seconds since 1970 as date and time in UTC.

    >>> format_utc(1_790_000_000.0), format_utc(1e300)
    ('2026-09-21 14:13 UTC', 'n/a')
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def shorten(text: str, length: int = 60) -> str:
    """Return the first line of `text`, cut to `length` characters."""
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= length else f"{line[: length - 3]}..."
