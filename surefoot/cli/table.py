"""Output of tables, sentences and times to a terminal or a pipe.

In a pipe, tables are aligned text.
"""

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
    """Print a table; the columns named in `right` are right-aligned.

    If the terminal is too narrow, long cells wrap, and columns that do not fit are printed as a
    second table below. If `num_hidden` is positive, a line below the table says that this number of
    further rows is in the output of `--json` only. `what` names the rows in this line.
    """
    harmless = [[without_control(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(headers, harmless, right, indent)
    else:
        print(plain_table(headers, harmless, right=right, indent=indent))
    if num_hidden > 0:
        print_text(f"{num_hidden:,} {what} are not shown; --json has all of them", indent=indent)


def without_control(text: str) -> str:
    """Return the text on one line, without terminal control characters.

    Text from a run folder may contain such characters.

    >>> without_control("red \x1b[31m, two\\nlines")
    'red ?[31m, two lines'
    """
    return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in text)


def plain_table(
    headers: Sequence[str], rows: Rows, *, right: Container[str] = (), indent: int = 0
) -> str:
    """Return a table as aligned text, without color or lines.

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
    """Return column widths that fit into `room` characters, as one dict per table.

    A dict maps the index of a column to its width. Columns that do not fit into the first table
    form further tables, which repeat the first column. Only a word that is wider than a line is
    broken.

    Args:
        natural: width of the longest cell of each column.
        longest: width of the longest word of each column.
        room: available characters per line.

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
    """Print pairs of a name and a value, one per line.

    A pair with an empty name continues the pair above. In a terminal, long values wrap with an
    indent. With `whole` they stay on one line, for example commands to copy.
    """
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        lines = [without_control(value)] if whole else _wrap(value, taken=width + 4)
        for number, line in enumerate(lines):
            print(f"  {name if not number else '':<{width}}  {line}")


def print_text(text: str, *, indent: int = 0) -> None:
    """Print a sentence; in a terminal, it wraps between words."""
    for line in _wrap(text, taken=indent):
        print(" " * indent + line)


def _wrap(text: str, *, taken: int) -> list[str]:
    """Wrap `text` to the width of the terminal minus `taken` columns; in a pipe, do not wrap."""
    room = shutil.get_terminal_size().columns - taken if sys.stdout.isatty() else sys.maxsize
    return textwrap.wrap(without_control(text), max(room, 20), break_on_hyphens=False) or [""]


def write_csv(path: Path, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write rows under their headers to a CSV file; None becomes an empty cell.

    Raises:
        StorageError: if the file cannot be written.
    """
    import csv

    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([headers, *rows])
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", hint="give another file with --csv"
        ) from None


def format_time(time_s: float | None) -> str:
    """Format a Unix time as local date and time; in a year other than the current, as a date.

    None and invalid times are formatted as `n/a`.
    """
    if time_s is None:
        return UNKNOWN
    try:
        there, now = time.localtime(time_s), time.localtime()
    except (OverflowError, ValueError, OSError):  # a foreign log may hold any number
        return UNKNOWN
    return time.strftime("%m-%d %H:%M" if there.tm_year == now.tm_year else "%Y-%m-%d", there)


def format_utc(time_s: float) -> str:
    """Format a Unix time as date and time in UTC; an invalid time as `n/a`.

    >>> format_utc(1_790_000_000.0), format_utc(1e300)
    ('2026-09-21 14:13 UTC', 'n/a')
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def shorten(text: str, length: int = 60) -> str:
    """Return the first line of `text`, truncated to `length` characters."""
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= length else f"{line[: length - 3]}..."
