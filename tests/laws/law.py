"""A rule over a tree of files, with trees that break it and a tree that only looks so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.laws.tree import Violation

Rule = Callable[[Path], list[Violation]]

# the command line of a planted project
MAIN = "import sys\ndef main():\n    {body}\n"


@dataclass(frozen=True)
class Plant:
    """Files that break a law, and a piece of what the law must say of them."""

    says: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Law:
    """A rule over a tree, trees that break it, and files that look like a break and are none."""

    rule: Rule
    plants: tuple[Plant, ...]
    allowed: Mapping[str, str] = field(default_factory=dict)
