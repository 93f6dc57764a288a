"""Prose in Markdown has one sentence a line, so that a changed sentence is one changed line.

`python -m tests.docs.sentences FILE ...` rewrites files so.
Code, tables, headings and comments stay as they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FENCE = re.compile(r"`{3,}|~{3,}")
ITEM = re.compile(r"(?:[-*+]|\d+\.) +")
# a blank line, a row, a heading, a comment, a quotation, a footnote
KEPT = re.compile(r"$|\||#|<|>|---|\[\^|\[[^\]]+\]: ")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|etc|cf|approx|No|Fig|al|resp|[A-Z])\.$")
BEGINS = re.compile(r"[A-Z0-9`\"*_\[(]|surefoot")
LABEL = re.compile(r"\*\*[^*]+\*\*|[A-Z][a-z]+:")  # belongs to the sentence behind it


def one_a_line(text: str) -> str:
    """Return the Markdown `text` with each sentence of its prose on a line of its own.

    Prose is paragraphs and list items.
    """
    lines: list[str] = []
    for line in _paragraphs(text):
        body = line.lstrip()
        if line.startswith("\0") or KEPT.match(body):
            lines.append(line.removeprefix("\0"))
            continue
        mark = ITEM.match(body)
        lead = line[: len(line) - len(body)]
        head = mark[0] if mark else ""
        first, *others = sentences(body[len(head) :])
        lines += [lead + head + first, *(lead + " " * len(head) + other for other in others)]
    return "\n".join(lines)


def _paragraphs(text: str) -> list[str]:
    """Lines of code behind a zero byte, and each paragraph or list item on one line."""
    lines: list[str] = []
    fence, goes_on = "", False
    for line in text.split("\n"):
        body = line.lstrip()
        begins = FENCE.match(body)
        if fence or begins:
            lines.append(f"\0{line}")
            fence = (
                ("" if body.startswith(fence) else fence) if fence else begins[0] if begins else ""
            )
            goes_on = False
        elif KEPT.match(body):
            lines.append(line)
            goes_on = False
        elif goes_on and not ITEM.match(body) and not lines[-1].endswith(("  ", "\\")):
            lines[-1] += f" {body}"
        else:
            lines.append(line)
            goes_on = True
    return lines


def sentences(text: str) -> list[str]:
    """Return the sentences of a paragraph.

    One inside code, brackets or quotation marks is part of the one around it.
    """
    found: list[str] = []
    start = at = depth = 0
    is_quoted = False
    while at < len(text):
        letter = text[at]
        if letter == "`":
            ticks = re.match("`+", text[at:])[0]  # type: ignore[index]
            closing = text.find(ticks, at + len(ticks))
            at = closing + len(ticks) if closing > 0 else at + len(ticks)
            continue
        depth += (letter in "([") - (letter in ")]" and depth > 0)
        is_quoted ^= letter == '"'
        if letter in ".?!" and not depth and not ABBREVIATION.search(text[start : at + 1]):
            stop = at + 1
            while stop < len(text) and text[stop] in '"*_)':
                is_quoted ^= text[stop] == '"'
                stop += 1
            ends = text[stop : stop + 1] == " " and BEGINS.match(text[stop + 1 :]) and not is_quoted
            if ends and not LABEL.fullmatch(text[start:stop]):
                found.append(text[start:stop])
                start = stop + 1
            at = stop
            continue
        at += 1
    return [*found, text[start:]]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(one_a_line(path.read_text(encoding="utf-8")), encoding="utf-8")
