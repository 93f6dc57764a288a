"""docs/reference/api.md out of the docstrings: `python -m tests.docs.api_page` writes it."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import surefoot

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api.md"
HEAD = """# Public API

Import from these modules and from `surefoot` itself; other modules of the package may move \
without notice.
`help(surefoot.data.Arrays)` prints a whole docstring.
A name or a parameter that changes stands in the changelog: a test compares all of them with those \
of the last release.
This page is generated from the docstrings by `python -m tests.docs.api_page`.
"""


def describe(value: Any) -> str:
    """The first paragraph of a docstring as one line; its type, for a value that has none."""
    if not callable(value) and not inspect.ismodule(value):
        return f"a `{type(value).__name__}`"
    text = inspect.getdoc(value) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def find_names() -> dict[str, dict[str, Any]]:
    """The public names of `surefoot` itself, then of each module of public names."""
    names = {name: getattr(surefoot, name) for name in surefoot.__all__}
    found = {"surefoot": {key: each for key, each in names.items() if not inspect.ismodule(each)}}
    for name, module in sorted(names.items()):
        if inspect.ismodule(module):
            found[f"surefoot.{name}"] = {key: getattr(module, key) for key in module.__all__}
    return found


def make() -> str:
    """The page: a table for each module."""
    parts = [HEAD]
    for home, names in find_names().items():
        module = sys.modules[home]
        parts += (
            ["## surefoot\n"] if module is surefoot else [f"\n## {home}\n", f"{describe(module)}\n"]
        )
        parts += table(names)
    return "\n".join(parts) + "\n"


def table(names: dict[str, Any]) -> list[str]:
    rows = [f"| `{name}` | {describe(value)} |" for name, value in sorted(names.items())]
    return ["| name | what it is |", "| --- | --- |", *rows]


if __name__ == "__main__":
    PAGE.write_text(make())
    print(PAGE)
