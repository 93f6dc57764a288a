"""Words that do not belong in what others read."""

from __future__ import annotations

import re
from pathlib import Path

from tests.laws.tree import Violation

READ = ("surefoot", "docs", "examples", "benchmarks", "recipes", "tests", ".ci")
OWN = "tests/laws"  # where the words stand as rules
HOSTILE = r"(?<![\w.~-])/tmp/"  # in a test it is the kind of name that must be refused
WORDS = {
    r"(?<![\w.~-])/work/": "a path of one machine; use a path from the project's root",
    HOSTILE: "a path of one machine; use a folder the reader names",
    r"\b(TODO|FIXME|XXX|HACK)\b": "a note to oneself; do it, or open an issue",
    r"\b(pypi\.org|pythonhosted\.org|download\.pytorch\.org)\b": "a registry's address; let the reader's own settings choose",
}


def words(root: Path) -> list[Violation]:
    """No path of one machine, no note to oneself, no registry's address in code, documents or results."""
    found = []
    for path in _texts(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        where = path.relative_to(root).as_posix()
        for number, line in enumerate(text.splitlines(), start=1):
            found += [
                Violation(f"{where}:{number}", f"{hit[0]} is {why}")
                for word, why in WORDS.items()
                if (hit := re.search(word, line)) and not (word == HOSTILE and where.startswith("tests/"))
            ]
    return found


def _texts(root: Path) -> list[Path]:
    inside = (path for folder in READ for path in (root / folder).rglob("*") if path.is_file())
    top = (path for path in root.iterdir() if path.is_file())
    return sorted(
        path
        for path in (*inside, *top)
        if not {"__pycache__", ".hypothesis", ".git"} & set(path.parts) and not path.relative_to(root).as_posix().startswith(OWN)
    )
