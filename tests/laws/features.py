"""The table of what works: each row names a command and a test, and both exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.laws.fresh import ends_of_help
from tests.laws.tree import FUNCTIONS, Violation, one_module

FEATURES = "docs/reference/features.md"
HEADER = ["id", "what", "command", "test"]


def features(root: Path) -> list[Violation]:
    """Rows `| id | what | command | test |` of the table of features.

    The id stands once, the command's verb exists, the test (file or file::test) exists.
    """
    path = root / FEATURES
    if not path.is_file():
        return [Violation(FEATURES, "is missing")]
    found: list[Violation] = []
    verbs: dict[tuple[str, ...], str] = {}
    seen: set[str] = set()
    for number, cells in _rows(path):
        where = f"{FEATURES}:{number}"
        if len(cells) != len(HEADER):
            found.append(
                Violation(where, f"has {len(cells)} cells, a row is | {' | '.join(HEADER)} |")
            )
            continue
        identity, what, command, test = cells
        if not re.fullmatch(r"[A-Z]{3}-\d\d", identity) or identity in seen:
            found.append(
                Violation(
                    where, f"the id {identity!r} is not of the form BAT-01, or stands here twice"
                )
            )
        seen.add(identity)
        if not what:
            found.append(Violation(where, "does not say what works"))
        commands = re.findall(r"`([^`]+)`", command)
        if not commands:
            found.append(Violation(where, "names no command in backticks"))
        verbs |= {words: where for one in commands for words in _verbs(one)}
        tests = re.findall(r"`([^`]+)`", test)
        if not tests:
            found.append(Violation(where, "names no test in backticks"))
        found += [
            Violation(where, f"there is no test {one}") for one in tests if not is_a_test(root, one)
        ]
    ends = ends_of_help(root, list(verbs)) if verbs else []
    return found + [
        Violation(where, f"there is no verb {' '.join(verb)}")
        for (verb, where), end in zip(verbs.items(), ends, strict=True)
        if end
    ]


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of the file's tables, without their heads; `\\|` is a bar inside a cell."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("|"):
            cells = [
                cell.strip().replace("\\|", "|")
                for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))
            ]
            if cells != HEADER and not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                yield number, cells


def _verbs(command: str) -> Iterator[tuple[str, ...]]:
    """The one or two plain words after each `surefoot`: (`train`, `digits`), (`spec`, `show`)."""
    for hit in re.finditer(r"\bsurefoot((?: [a-z][a-z-]*(?=\s|$)){1,2})", command):
        yield tuple(hit[1].split())


def is_a_test(root: Path, test: str) -> bool:
    """Whether `tests/file.py`, `tests/file.py::test` or `::Class::test` is in the tree."""
    file, *names = test.partition("[")[0].split("::")
    path = root / file
    if not file.startswith("tests/") or not (path.is_file() or (path.is_dir() and not names)):
        return False
    body = one_module(root, Path(file)).syntax.body if names else []
    for name in names:
        node = next(
            (
                one
                for one in body
                if isinstance(one, (*FUNCTIONS, ast.ClassDef)) and one.name == name
            ),
            None,
        )
        if node is None:
            return False
        body = node.body
    return True
