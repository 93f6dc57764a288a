"""The public API of the last release: `python -m tests.docs.public_api` writes it for the next.

A line is a name with its parameters, as `surefoot.data.Arrays.read(indices)`; `=` follows a
parameter with a default.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import griffe

from tests.docs.api_page import find_names

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = ROOT / "tests" / "fixtures" / "public_api.txt"
MARKS = {"variadic positional": "*", "variadic keyword": "**"}


def find_lines() -> list[str]:
    """Return the lines of all public names of this checkout, sorted."""
    package = griffe.load("surefoot", search_paths=[ROOT], resolve_aliases=True)
    return sorted(
        line
        for home, names in find_names().items()
        for name, value in names.items()
        for line in _describe(f"{home}.{name}", value, package)
    )


def _describe(name: str, value: Any, package: Any) -> Iterator[str]:
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        yield f"{name}: {type(value).__name__}"
        return
    path = f"{value.__module__}.{value.__qualname__}"
    found = package[path.removeprefix("surefoot.")]
    yield f"{name}({_join(found.parameters)})"
    if found.is_class:
        for key, member in found.all_members.items():
            if not key.startswith("_"):
                inside = f"({_join(member.parameters)})" if member.is_function else ""
                yield f"{name}.{key}{inside}"


def _join(parameters: Iterable[griffe.Parameter]) -> str:
    """Return the names of parameters, with the marks that Python writes before and after them."""
    told, is_keyword = list[str](), False
    for each in parameters:
        kind = each.kind.value if each.kind else ""
        if each.name in ("self", "cls"):
            continue
        if kind == "keyword-only" and not is_keyword:
            told.append("*")
        is_keyword = is_keyword or kind in ("keyword-only", "variadic positional")
        default = "=" if each.default is not None and kind not in MARKS else ""
        told.append(f"{MARKS.get(kind, '')}{each.name}{default}")
    return ", ".join(told)


def find_untold(before: Iterable[str], now: Iterable[str], changelog: str) -> list[str]:
    """Return the lines that came or went, and whose name the section Unreleased does not hold.

    Of `surefoot.data.Arrays.read(indices)` this is `read`, `Arrays.read` or the whole name, within
    backticks.
    """
    section = changelog.partition("## Unreleased")[2].partition("\n## ")[0]
    told = set(re.findall(r"[\w.]+", " ".join(re.findall(r"`([^`]+)`", section))))
    before, now = set(before), set(now)
    return [
        f"{'-' if line in before else '+'} {line}"
        for line in sorted(before ^ now)
        if told.isdisjoint(_endings(re.split(r"[(:]", line)[0]))
    ]


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(find_lines()) + "\n")
    print(SNAPSHOT)
