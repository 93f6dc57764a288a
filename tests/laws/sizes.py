"""Budgets of files, functions, constructors and folders; and names that say nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from pathlib import Path

import surefoot
from tests.laws.tree import FUNCTIONS, Violation, modules

FILE_LINES, FUNCTION_LINES, CONSTRUCTOR_ARGUMENTS, FOLDER_ENTRIES = 500, 80, 8, 14
CODE = ("surefoot", "tests", "examples", "benchmarks")
PACKAGE_ROOT = {
    "core",
    "native",
    "contract",
    "runtime",
    "control",
    "components",
    "train",
    "tasks",
    "trial",
    "prove",
    "tune",
    "cli",
    "__init__.py",
    "__main__.py",
    "py.typed",
}
PUBLIC = frozenset(surefoot._MODULES)  # modules of public names, which only import them
PUBLIC_FILES = {f"{name}.py" for name in PUBLIC}
CATCH_ALL = {
    "util",
    "utils",
    "helper",
    "helpers",
    "common",
    "misc",
    "stuff",
    "tools",
    "shared",
    "lib",
}


def files(root: Path) -> list[Violation]:
    """A file has at most 500 lines; near 300 is the aim."""
    lengths = ((module, len(module.text.splitlines())) for module in modules(root, *CODE))
    return [
        Violation(
            module.at(length),
            f"the file has {length} lines, {FILE_LINES} are allowed; split it by what its parts do",
        )
        for module, length in lengths
        if length > FILE_LINES
    ]


def functions(root: Path) -> list[Violation]:
    """A function has at most 80 lines; near 25 is the aim."""
    return [
        Violation(
            module.at(node.lineno), f"{node.name} has {length} lines, {FUNCTION_LINES} are allowed"
        )
        for module in modules(root, *CODE)
        for node in module.nodes
        if isinstance(node, FUNCTIONS)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]


def constructors(root: Path) -> list[Violation]:
    """A constructor takes at most 8 arguments.

    Frozen and keyword-only records hold what they must.
    """
    found = []
    for module in modules(root):
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                count = _constructor_arguments(node)
                if count > CONSTRUCTOR_ARGUMENTS:
                    what = (
                        f"{node.name} takes {count} arguments, {CONSTRUCTOR_ARGUMENTS} are "
                        "allowed; group what belongs together"
                    )
                    found.append(Violation(module.at(node.lineno), what))
    return found


def _constructor_arguments(node: ast.ClassDef) -> int:
    for part in node.body:
        if isinstance(part, FUNCTIONS) and part.name == "__init__":
            every = part.args
            return (
                len([*every.posonlyargs, *every.args, *every.kwonlyargs])
                - 1
                + bool(every.vararg)
                + bool(every.kwarg)
            )
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    if any(
        re.match(r"(dataclasses\.)?dataclass\b", mark)
        and not re.search(r"(frozen|kw_only)=True", mark)
        for mark in marks
    ):
        return sum(
            isinstance(part, ast.AnnAssign) and "init=False" not in ast.unparse(part)
            for part in node.body
        )
    return 0


def loose_arguments(root: Path) -> list[Violation]:
    """No `**kwargs`: what a function takes is named and typed."""
    return [
        Violation(
            module.at(node.lineno),
            f"{node.name} takes **{loose.arg} of any kind; name what it takes",
        )
        for module in modules(root)
        for node in module.nodes
        if isinstance(node, FUNCTIONS)
        and (loose := node.args.kwarg) is not None
        and (
            loose.arg == "kwargs"
            or loose.annotation is None
            or ast.unparse(loose.annotation) in ("Any", "object")
        )
    ]


def folders(root: Path) -> list[Violation]:
    """No folder of the package, and not the project's own, shows more than 14 entries."""
    package = root / "surefoot"
    every = [
        root,
        package,
        *(path for path in sorted(package.rglob("*")) if path.is_dir() and _is_shown(path)),
    ]
    hidden = _ignored(root)
    return [
        Violation(
            folder.relative_to(root).as_posix(),
            f"shows {count} entries, {FOLDER_ENTRIES} are allowed; make a room of some",
        )
        for folder in every
        if (
            count := sum(
                _is_shown(path) and not _is_apart(root, path, hidden) for path in folder.iterdir()
            )
        )
        > FOLDER_ENTRIES
    ]


def _is_apart(root: Path, path: Path, hidden: Collection[str]) -> bool:
    """Whether an entry counts for nothing.

    That is what git ignores beside the root, and the modules of public names.
    """
    return path.name in {root: hidden, root / "surefoot": PUBLIC_FILES}.get(path.parent, ())


def package_root(root: Path) -> list[Violation]:
    """The package's root shows the architecture's folders and the modules of public names alone."""
    return [
        Violation(
            f"surefoot/{path.name}",
            f"does not belong in the package's root, which shows {', '.join(sorted(PACKAGE_ROOT))}",
        )
        for path in sorted((root / "surefoot").iterdir())
        if _is_shown(path) and path.name not in PACKAGE_ROOT | PUBLIC_FILES
    ]


def module_names(root: Path) -> list[Violation]:
    """No module is called utils, helpers, common or misc: a name says what is inside."""
    return [
        Violation(module.path.as_posix(), f"{name} says nothing; name the file for what it does")
        for module in modules(root, *CODE)
        for part in module.path.with_suffix("").parts
        for name in part.lower().split("_")
        if name in CATCH_ALL
    ]


def _is_shown(path: Path) -> bool:
    return (
        not path.name.startswith(".") and path.name != "__pycache__" and path.suffix != ".egg-info"
    )


def _ignored(root: Path) -> set[str]:
    path = root / ".gitignore"
    return (
        {line.strip("/") for line in path.read_text().split() if line.startswith("/")}
        if path.is_file()
        else set()
    )
