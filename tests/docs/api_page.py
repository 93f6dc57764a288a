"""docs/reference/api.md out of the docstrings: `python -m tests.docs.api_page` writes it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import surefoot
from tests.docs.sentences import one_a_line

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api.md"
HEAD = """# Public API

Import from these modules and from `surefoot` itself; other modules of the package may move \
without notice.
`help(surefoot.data.Arrays)` prints a docstring in Python.
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
    """The page: for each module a table of its names, then the docstring of each."""
    parts, anchors = [HEAD], dict[int, str]()
    for home, names in find_names().items():
        parts += [f"\n## {home}\n", f"{describe(sys.modules[home])}\n"]
        new = {name: value for name, value in sorted(names.items()) if _is_new(value, anchors)}
        for name, value in new.items():
            anchors[id(value)] = _anchor(f"{home}.{name}", anchors.values())
        parts += table(names, anchors)
        for name, value in new.items():
            parts += [f"\n### {home}.{name}\n", f"`{name}{sign(value)}`\n", *render(value)]
    return one_a_line(re.sub(r"\n{3,}", "\n\n", "\n".join(parts).strip() + "\n"))


def _is_new(value: Any, anchors: dict[int, str]) -> bool:
    """Whether a name is a class or function that no module before describes."""
    return callable(value) and id(value) not in anchors


def _anchor(heading: str, taken: Collection[str]) -> str:
    """The anchor that GitHub gives a heading; the second of two that differ in case ends in -1."""
    made = heading.replace(".", "").lower()
    return f"{made}-1" if made in taken else made


def table(names: dict[str, Any], anchors: dict[int, str]) -> list[str]:
    rows = [
        f"| {f'[`{name}`](#{anchors[id(value)]})' if id(value) in anchors else f'`{name}`'} "
        f"| {describe(value)} |"
        for name, value in sorted(names.items())
    ]
    return ["| name | what it is |", "| --- | --- |", *rows]


class _Elided:
    def __repr__(self) -> str:
        return "..."


def sign(value: Any) -> str:
    """Return the parameters of a class or function, with those defaults that are plain values."""
    if getattr(value, "_is_protocol", False):
        return ""
    signature = inspect.signature(value)
    plain = (type(None), bool, int, float, str, tuple, type(inspect.Parameter.empty))
    made = [
        each.replace(
            annotation=each.empty,
            default=each.default if isinstance(each.default, plain) else _Elided(),
        )
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=made, return_annotation=signature.empty))


def read_items(text: str, title: str) -> dict[str, str]:
    """Return the items of the section `title` of a docstring: names, each with its text."""
    block = next((each for each in text.split("\n\n") if each.startswith(f"{title}:\n")), "")
    items = re.split(r"\n(?=\S)", dedent(block.partition("\n")[2])) if block else []
    parts = (item.partition(": ") for item in items)
    return {name.lstrip("*"): " ".join(words.split()) for name, _, words in parts}


def render(value: Any) -> Iterator[str]:
    """Yield the docstring of a class or function as Markdown."""
    text = inspect.getdoc(value) or ""
    types = {name: each.annotation for name, each in inspect.signature(value).parameters.items()}
    for block in text.split("\n\n"):
        title = block.partition(":\n")[0]
        if title in ("Args", "Raises"):
            yield f"{title}:\n"
            for name, words in read_items(text, title).items():
                yield (
                    f"- `{name}`"
                    + (f" (`{types[name]}`)" if title == "Args" else "")
                    + f": {words}"
                )
            yield ""
        elif block.startswith(("    ", ">>>")):
            yield f"<!-- not run: part of a docstring -->\n```python\n{dedent(block)}\n```\n"
        else:
            yield f"{' '.join(block.split())}\n"


if __name__ == "__main__":
    PAGE.write_text(make())
    print(PAGE)
