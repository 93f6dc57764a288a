"""The code blocks of a Markdown document, with what the comments above them ask for.

<!-- not run: reason -->     leave this block alone; the reason is for the reader
<!-- file: my_task.py -->    the block is this file: write it, then run it (Python) or check it as
                             a spec (TOML)
<!-- exits: 2 -->            the last command ends with this code, not 0
<!-- needs: tars -->         what an earlier block made; where that was left out, without the data
                             sets, this one is, too
<!-- output: checked -->     each line shown below a command is in its output; ... stands for
                             anything
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

DIRECTIVES = ("not run", "file", "exits", "output", "needs")
SHELL = ("console", "bash", "sh", "shell")
PYTHON = ("python", "py", "pycon")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, text, the line where it opens, and the comments above it."""

    language: str
    text: str
    line: int
    asks: dict[str, str] = field(default_factory=dict)

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block: lines after `$ `, with their continuations.

        The whole text where no line has a `$ `.
        """
        if not re.search(r"^\$ ", self.text, re.MULTILINE):
            return [self.text]
        found: list[str] = []
        going_on = False
        for line in self.text.splitlines():
            if going_on:
                found[-1] += "\n" + line.removeprefix("> ")
            elif line.startswith("$ "):
                found.append(line[2:])
            going_on = (going_on or line.startswith("$ ")) and line.endswith("\\")
        return found

    @property
    def shown(self) -> list[str]:
        """The output that a console block shows: every line that is no command."""
        inside = {line for command in self.commands for line in command.splitlines()}
        lines = (
            line
            for line in self.text.splitlines()
            if not line.startswith("$ ") and line.removeprefix("> ") not in inside
        )
        return [line for line in lines if line.strip()]


def blocks(text: str) -> list[Block]:
    """Every fenced block of a document, in order."""
    found: list[Block] = []
    asks: dict[str, str] = {}
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        fence = re.match(r"^( *)(```+|~~~+) *([\w-]*)", line)
        if fence:
            indent, mark, language = fence.groups()
            body: list[str] = []
            for _, inner in lines:
                if inner.strip() == mark:
                    break
                body.append(inner.removeprefix(indent))
            found.append(Block(language.lower(), "\n".join(body) + "\n", number, asks))
            asks = {}
        elif comment := re.match(r"^ *<!-- *([a-z ]+?) *: *(.*?) *-->$", line):
            if comment[1] in DIRECTIVES:
                asks = {**asks, comment[1]: comment[2]}
        elif line.strip():
            asks = {}
    return found
