"""The items of a reading test: 200 passages, messages, docstrings, calls and lines of help.

`python -m tests.docs.reading_items --seed N` prints them.
A reader who knows PyTorch and not surefoot reads each once, and lists those that take two readings.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

EACH = 40  # items of a group
GUIDES = 3  # drawn in addition to the README
AROUND = 3  # lines excerpt before and after a call
FENCE = re.compile(r"\s*(?:`{3,}|~{3,})")
REFERENCE = ("docs/reference/spec.md", "docs/reference/events.md")
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Item:
    file: Path
    line: int
    text: str


def passages(file: Path) -> Iterator[Item]:
    """Yield each paragraph, list, table and code block of the Markdown `file`."""
    block: list[str] = []
    start = 0
    is_code = False
    for number, line in enumerate([*file.read_text().splitlines(), ""], 1):
        if FENCE.match(line):
            is_code = not is_code
        if line.strip() or is_code:
            start = start if block else number
            block.append(line)
        elif block:
            # a heading or a comment alone is not a passage
            if any(not each.startswith(("#", "<!--")) for each in block):
                yield Item(file, start, "\n".join(block))
            block = []


def rows(file: Path) -> Iterator[Item]:
    """Yield each row of the tables of the Markdown `file`, without their heads."""
    lines = file.read_text().splitlines()
    for number, (before, line) in enumerate(itertools.pairwise(lines), 2):
        if line.startswith("| ") and not line.startswith("| ---") and before.startswith("|"):
            yield Item(file, number, line)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def messages(file: Path, tree: ast.Module) -> Iterator[Item]:
    """Yield each error that is raised with a text, and each warning."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args or not _is_text(call.args[0]):
            continue
        if isinstance(node, ast.Raise) or _name(call) == "warn":
            yield Item(file, call.lineno, ast.unparse(node))


def docstrings(file: Path, tree: ast.Module) -> Iterator[Item]:
    """Yield each docstring of a class or function whose name has no leading underscore."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINITION) and not node.name.startswith("_"):
            text = ast.get_docstring(node)
            if text:
                kind = "class" if isinstance(node, ast.ClassDef) else "def"
                yield Item(file, node.lineno, f"{kind} {node.name}\n{text}")


def defined(trees: dict[Path, ast.Module]) -> dict[str, int]:
    """Return the names of the functions and classes of `trees`, each with 0 for its calls."""
    nodes = (node for tree in trees.values() for node in ast.walk(tree))
    return {node.name: 0 for node in nodes if isinstance(node, DEFINITION)}


def calls(file: Path, tree: ast.Module, names: dict[str, int]) -> Iterator[Item]:
    """Yield the first call of each of `names`, with the lines around it; count it in `names`."""
    lines = file.read_text().splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and names.get(_name(node)) == 0:
            names[_name(node)] += 1
            at = node.lineno - 1
            excerpt = lines[max(at - AROUND, 0) : at + AROUND + 1]
            yield Item(file, node.lineno, "\n".join([f"{_name(node)}:", *excerpt]))


def helps(file: Path, tree: ast.Module) -> Iterator[Item]:
    """Yield each `help` text of an option, an argument or a verb."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "help" and _is_text(keyword.value):
                    yield Item(file, node.lineno, ast.unparse(node))


def draw(root: Path, seed: int) -> dict[str, list[Item]]:
    """Draw the items of the five groups below `root`."""
    rng = random.Random(seed)
    sources = sorted((root / "surefoot").rglob("*.py"))
    trees = {file: ast.parse(file.read_text()) for file in sources}
    names = defined(trees)

    def of_code(find: Callable[[Path, ast.Module], Iterator[Item]]) -> list[Item]:
        return [item for file, tree in trees.items() for item in find(file, tree)]

    guides = rng.sample(sorted((root / "docs/guides").glob("*.md")), GUIDES)
    groups = {
        "passages": [item for file in (root / "README.md", *guides) for item in passages(file)],
        "messages": of_code(messages),
        "docstrings": of_code(docstrings),
        "calls": of_code(lambda file, tree: calls(file, tree, names)),
        "help": of_code(helps) + [row for name in REFERENCE for row in rows(root / name)],
    }
    return {name: rng.sample(items, EACH) for name, items in groups.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    args = parser.parse_args()
    numbers = iter(range(1, 1 + 5 * EACH))
    for name, items in draw(args.root.resolve(), args.seed).items():
        print(f"\n## {name}\n")
        for item in items:
            place = item.file.relative_to(args.root.resolve())
            print(f"[{next(numbers)}] {place}:{item.line}\n{item.text}\n")


if __name__ == "__main__":
    main()
