"""Tests of tables at a terminal.

Every word stays whole, nothing is left out, no line is longer than the terminal.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.cli.table import GAP, PROSE, fit_columns

CODE = """
from surefoot.cli.table import print_pairs, print_table, print_text
ratio = "0.945x (0.931 to 0.967)"
headers = ("rung", "verdict", "time", "time from the start", "memory", "samples/s", "start-up")
headers += ("score", "numbers", "expected")
score, expected = "98.61 % (start 98.33 %)", "memory 0.5x, time 1.3x"
print_table(headers, [("no clipping", "REJECTED", *[ratio] * 5, score, "not measured", expected)])
sentence = "many short words of one long sentence " * 4
print_table(("module", "what is told of it"), [("encoder.layers.0.linear1", sentence)])
print_table(("path",), [("/" + "deep/" * 60,)])
sentence = "a sentence of many words that goes on in the next line of a narrow terminal, "
print_text(sentence + "and is whole in a pipe, as it was given")
print_pairs([("name", sentence + "below its own beginning")])
"""


def at_terminal(columns: int, code: str) -> list[str]:
    """The lines that a program prints at a terminal so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    }
    words = [sys.executable, "-c", code]
    with subprocess.Popen(
        words,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**variables, "TERM": "xterm-256color"},
    ) as child:
        os.close(theirs)
        found = b""
        with suppress(OSError):  # what Linux says at the end of a terminal
            while part := os.read(ours, 1 << 16):
                found += part
    os.close(ours)
    assert child.returncode == 0, found.decode()
    return re.sub(r"\x1b\[[0-9;]*m", "", found.decode()).splitlines()


@pytest.mark.parametrize("columns", [50, 80, 120, 300])
def test_at_a_terminal_every_word_stays_whole_and_every_line_is_on_one(columns: int) -> None:
    lines = at_terminal(columns, CODE)
    assert max(map(len, lines)) <= columns
    shown, words = (
        set(" ".join(lines).split()),
        re.findall(r"[^\s\"]+", " ".join(re.findall(r'"[^"]*"', CODE))),
    )
    assert {word for word in words if word not in ("/", "deep/")} - shown == set()
    assert "/" + "deep/" * 60 in "".join(map(str.strip, lines))  # a word that no line holds
    assert sum("no clipping" in line for line in lines) == {50: 7, 80: 4, 120: 3, 300: 1}[columns]


@given(
    columns=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=12),
    room=st.integers(20, 200),
)
def test_a_table_of_any_columns_fits_into_any_terminal(
    columns: list[tuple[int, int]], room: int
) -> None:
    natural, longest = [max(each) for each in columns], [min(each) for each in columns]
    tables = fit_columns(natural, longest, room)
    assert [
        column for widths in tables for column in widths if column or widths is tables[0]
    ] == list(range(len(columns)))
    for widths in tables:
        assert next(iter(widths)) == 0
        assert sum(widths.values()) + GAP * (len(widths) - 1) <= room
        assert all(1 <= width <= natural[column] for column, width in widths.items())
        least = [min(natural[column], max(longest[column], PROSE)) for column in widths]
        if sum(least) + GAP * (len(widths) - 1) <= room:
            assert all(width >= each for width, each in zip(widths.values(), least, strict=True))
