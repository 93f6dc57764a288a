"""Rows on standard output: a table at a terminal, aligned text in a pipe; and the words for what is not there."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Container, Sequence

from surefoot.core.units import UNKNOWN

Rows = Sequence[Sequence[str]]


def print_table(headers: Sequence[str], rows: Rows, *, right: Container[str] = (), indent: int = 0) -> None:
    """Print `rows` under `headers`; the columns named in `right` stand flush right."""
    harmless = [[without_control(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(headers, harmless, right, indent)
    else:
        print(plain_table(headers, harmless, right=right, indent=indent))


def without_control(text: str) -> str:
    """The text on one line, without characters that steer a terminal: a stranger's run may hold them.

    >>> without_control("red \x1b[31m, two\\nlines")
    'red ?[31m, two lines'
    """
    return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in text)


def plain_table(headers: Sequence[str], rows: Rows, *, right: Container[str] = (), indent: int = 0) -> str:
    """Aligned text without colour or lines.

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
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in headers:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text: a bracket in a name is no markup
    Console(highlight=False).print(Padding(table, (0, 0, 0, indent), expand=False))


def print_pairs(pairs: Sequence[tuple[str, str]], *, whole: bool = False) -> None:
    """Names and what they are, one a line; a name that is empty goes on with the line above.

    At a terminal a long line goes on below its own beginning, unless it is to stay `whole`, as a command to copy is.
    """
    width = max(len(name) for name, _ in pairs)
    room = shutil.get_terminal_size().columns - width - 4 if sys.stdout.isatty() and not whole else sys.maxsize
    for name, value in pairs:
        lines = textwrap.wrap(without_control(value), max(room, 20), break_on_hyphens=False) or [""]
        for number, line in enumerate(lines):
            print(f"  {name if not number else '':<{width}}  {line}")


def format_time(time_s: float | None) -> str:
    """Seconds since 1970 as date and time of day here; of another year the date alone."""
    if time_s is None:
        return UNKNOWN
    try:
        there, now = time.localtime(time_s), time.localtime()
    except (OverflowError, ValueError, OSError):  # a stranger's log may hold any number
        return UNKNOWN
    return time.strftime("%m-%d %H:%M" if there.tm_year == now.tm_year else "%Y-%m-%d", there)


def format_utc(time_s: float) -> str:
    """Seconds since 1970 as date and time of day for readers elsewhere.

    >>> format_utc(1_790_000_000.0), format_utc(1e300)
    ('2026-09-21 14:13 UTC', 'n/a')
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def shorten(text: str, length: int = 60) -> str:
    """The first line of `text`, cut to `length` characters."""
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= length else f"{line[: length - 3]}..."
