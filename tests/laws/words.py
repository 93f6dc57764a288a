"""Words that do not belong in what others read."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.laws.tree import FUNCTIONS, Violation, modules

READ = ("surefoot", "docs", "examples", "benchmarks", "recipes", "tests", ".ci")
OWN = "tests/laws"  # where the words stand as rules
LINE_END = "\n"
HOSTILE = r"(?<![\w.~-])/tmp/"  # in a test it is the kind of name that must be refused
WORDS = {
    r"(?<![\w.~-])/work/": "a path of one machine; use a path from the project's root",
    HOSTILE: "a path of one machine; use a folder the reader names",
    r"\b(TODO|FIXME|XXX|HACK)\b": "a note to oneself; do it, or open an issue",
    r"\b(pypi\.org|pythonhosted\.org|download\.pytorch\.org)\b": (
        "a registry's address; let the reader's own settings choose"
    ),
}

INNER = re.compile(
    r"(?<!-m )\bsurefoot\."
    r"(components|train|runtime|contract|core|control|prove|trial|cli|tasks)\.\w+"
)
PRONOUNS = re.compile(
    r"(how|whether|what|which|who|whose|whom|it|its|they|them|their|this|that|these|those|ones?|both"
    r"|he|she|we|you|i|others"
    r"|(what|which|who)ever|(no|some|any|every)body|(no|some|any|every)thing|none)\b",
    re.IGNORECASE,
)


def class_names(root: Path) -> list[Violation]:
    """A name of a class stands in one file of the package.

    Who reads it elsewhere knows which is meant.
    """
    homes: dict[str, dict[str, str]] = defaultdict(dict)
    for module in modules(root):
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                homes[node.name].setdefault(module.path.as_posix(), module.at(node.lineno))
    return [
        Violation(
            places[0],
            f"{name} is a class of {', '.join(places[1:])} as well; name each for what it is",
        )
        for name, found in sorted(homes.items())
        if len(places := list(found.values())) > 1
    ]


def first_words(root: Path) -> list[Violation]:
    """A docstring does not begin with a pronoun or a question word.

    It says what a function returns or does, and what a class is.
    """
    return [
        Violation(
            module.at(node.body[0].lineno),
            f"the docstring begins with {word[0]!r}; begin with a verb or a noun",
        )
        for module in modules(root)
        for node in module.nodes
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
        and (word := PRONOUNS.match(ast.get_docstring(node) or ""))
    ]


def public_homes(root: Path) -> list[Violation]:
    """A message names the public module of a class or function: a room behind it may be moved."""
    found = []
    for module in modules(root):
        docs = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
        texts = [
            node for node in module.nodes if isinstance(node, ast.Constant) and id(node) not in docs
        ]
        inner = (
            (node, INNER.search(node.value))
            for node in texts
            if isinstance(node.value, str) and " " in node.value
        )
        found += [
            Violation(
                module.at(node.lineno),
                f"the message names {name[0]}; name its public home, as surefoot.data",
            )
            for node, name in inner
            if name
        ]
    return found


def words(root: Path) -> list[Violation]:
    """No machine's path, note to oneself or registry's address in code, documents or results."""
    found = []
    for path in _texts(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        where = path.relative_to(root).as_posix()
        found += [
            Violation(f"{where}:{text.count(LINE_END, 0, hit.start()) + 1}", f"{hit[0]} is {why}")
            for word, why in WORDS.items()
            if not (word == HOSTILE and where.startswith("tests/"))
            for hit in re.finditer(word, text)
        ]
    return found


def _texts(root: Path) -> list[Path]:
    inside = (path for folder in READ for path in (root / folder).rglob("*") if path.is_file())
    top = (path for path in root.iterdir() if path.is_file())
    return sorted(
        path
        for path in (*inside, *top)
        if not {"__pycache__", ".hypothesis", ".git"} & set(path.parts)
        and not path.relative_to(root).as_posix().startswith(OWN)
    )
