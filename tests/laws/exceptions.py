"""The one error tree.

Every exception stands in core/errors.py, in its drawing, and in the table of exit codes.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

from tests.laws.tree import FUNCTIONS, Module, Violation, modules

ERRORS = "surefoot/core/errors.py"
TABLE = "docs/reference/exit-codes.md"
HELP = "surefoot/cli/main.py"
BUILTIN = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}


def in_one_file(root: Path) -> list[Violation]:
    """Every exception of ours is defined in core/errors.py."""
    every = modules(root)
    ours = {
        node.name
        for module in every
        if module.path.as_posix() == ERRORS
        for node in module.syntax.body
        if isinstance(node, ast.ClassDef)
    }
    return [
        Violation(module.at(node.lineno), f"the exception {node.name} belongs in core/errors.py")
        for module in every
        if module.path.as_posix() != ERRORS
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
        and any(
            _last(base) in BUILTIN | ours or _last(base).endswith("Error") for base in node.bases
        )
    ]


def drawn(root: Path) -> list[Violation]:
    """The tree in the docstring of core/errors.py is that of its classes and exit codes."""
    module = next((one for one in modules(root) if one.path.as_posix() == ERRORS), None)
    if module is None:
        return [Violation(ERRORS, "is missing")]
    real, picture = _real_tree(module), _drawn_tree(ast.get_docstring(module.syntax) or "")
    found = [
        Violation(ERRORS, f"{name} is not in the drawing") for name in real if name not in picture
    ]
    found += [
        Violation(ERRORS, f"the drawing has {name}, which is no class")
        for name in picture
        if name not in real
    ]
    for name in real.keys() & picture.keys():
        (parent, code), (drawn_parent, drawn_code) = real[name], picture[name]
        if drawn_parent is not None and parent != drawn_parent:
            found.append(
                Violation(ERRORS, f"{name} is drawn under {drawn_parent} and derives from {parent}")
            )
        if drawn_code is not None and code != drawn_code:
            found.append(
                Violation(ERRORS, f"{name} is drawn with exit code {drawn_code} and has {code}")
            )
    return found


def in_the_table(root: Path) -> list[Violation]:
    """docs/reference/exit-codes.md has a row for each exit code, with the errors that cause it."""
    module = next(one for one in modules(root) if one.path.as_posix() == ERRORS)
    path = root / TABLE
    rows = (
        dict(re.findall(r"^\| `?(\d+)`? \|(.*)$", path.read_text(), re.MULTILINE))
        if path.is_file()
        else {}
    )
    codes = _codes(module)
    found = [
        Violation(TABLE, f"has no row for exit code {code}")
        for code in sorted(codes)
        if str(code) not in rows
    ]
    found += [
        Violation(TABLE, f"the row of exit code {code} does not name {name}")
        for name, (_, code) in _real_tree(module).items()
        if code is not None
        and name not in ("SurefootError", "RunError")
        and name not in rows.get(str(code), "")
    ]
    known = {str(code) for code in codes} | {str(code) for _, code in _real_tree(module).values()}
    return found + [
        Violation(TABLE, f"exit code {code} is nowhere in {ERRORS}")
        for code in rows
        if code not in known
    ]


def in_the_help(root: Path) -> list[Violation]:
    """`surefoot --help` lists the exit codes of core/errors.py, each once, in order.

    So does the docstring of core/errors.py, together with its drawing.
    """
    every = {module.path.as_posix(): module for module in modules(root)}
    constants, tree = _codes(every[ERRORS]), _real_tree(every[ERRORS])
    codes = constants | {code for _, code in tree.values() if code is not None}
    docstring = ast.get_docstring(every[ERRORS].syntax) or ""
    told = {
        HELP: _listed(" ".join(_strings(every[HELP])), "Exit codes:"),
        ERRORS: _listed(docstring, "Other exit codes:"),
    }
    drawn_codes = {code for _, code in _drawn_tree(docstring).values() if code is not None}
    wanted = {HELP: codes, ERRORS: codes - drawn_codes}
    return [
        Violation(path, f"lists the exit codes {told[path]}, and they are {sorted(wanted[path])}")
        for path in told
        if told[path] != sorted(wanted[path])
    ]


def _strings(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _listed(text: str, title: str) -> list[int]:
    """The numbers that begin the items of the list behind `title`, up to its period."""
    items = text.partition(title)[2].partition(".")[0].split(",")
    return [int(hit[1]) for item in items if (hit := re.match(r"\s*(\d+) ", item))]


def _codes(module: Module) -> set[int]:
    return {
        int(node.value.value)
        for node in module.syntax.body
        if isinstance(node, ast.Assign) and _is_code(node)
    }


def raised(root: Path) -> list[Violation]:
    """What is raised to a user is of our tree.

    Builtins are for Python's protocols, for pydantic, and inside a `try` for them.
    """
    found = []
    for module in modules(root):
        free = {
            "AttributeError",
            "StopIteration",
            "SystemExit",
            "KeyboardInterrupt",
            "AssertionError",
        }
        if any(one.target.startswith("pydantic.") for one in module.imports):
            # a validator's way to refuse; pydantic turns it into its own error
            free.add("ValueError")
        if module.path.as_posix().startswith("surefoot/tasks/"):
            # what a user's constructor raises too; contract/task.py turns it into a TaskError
            free.add("ValueError")
        for node, caught in _raises(module.syntax, frozenset()):
            name = (
                _last(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
                if node.exc is not None
                else ""
            )
            if name in BUILTIN - free and not _is_caught(name, caught):
                found.append(
                    Violation(
                        module.at(node.lineno),
                        f"raises {name}; raise one of core/errors.py, with a hint",
                    )
                )
    return found


def _raises(node: ast.AST, caught: frozenset[str]) -> Iterator[tuple[ast.Raise, frozenset[str]]]:
    """Every raise of the file, with the names that the `try` blocks around it catch.

    Only those of its own function.
    """
    for name, value in ast.iter_fields(node):
        inner = frozenset[str]() if isinstance(node, FUNCTIONS) else caught
        if isinstance(node, ast.Try) and name == "body":
            types = (
                one for handler in node.handlers if handler.type for one in ast.walk(handler.type)
            )
            inner = caught | {one.id for one in types if isinstance(one, ast.Name)}
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Raise):
                yield child, inner
            # no raise can stand in an expression
            elif isinstance(child, ast.AST) and not isinstance(child, ast.expr):
                yield from _raises(child, inner)


def _is_caught(name: str, caught: frozenset[str]) -> bool:
    return any(
        issubclass(getattr(builtins, name), getattr(builtins, one)) for one in caught & BUILTIN
    )


def _real_tree(module: Module) -> dict[str, tuple[str, int | None]]:
    """Class -> its parent and exit code; a code that is not set is the parent's."""
    constants = {
        node.targets[0].id: int(node.value.value)
        for node in module.syntax.body
        if isinstance(node, ast.Assign) and _is_code(node) and isinstance(node.targets[0], ast.Name)
    }
    tree: dict[str, tuple[str, int | None]] = {}
    for node in module.syntax.body:
        if not isinstance(node, ast.ClassDef):
            continue
        parent = _last(node.bases[0]) if node.bases else ""
        code = tree[parent][1] if parent in tree else None
        for part in node.body:
            if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "exit_code":
                code = (
                    constants.get(ast.unparse(part.value))
                    if isinstance(part.value, ast.Name)
                    else ast.literal_eval(part.value)
                )
        tree[node.name] = (parent, code)
    return tree


def _drawn_tree(text: str) -> dict[str, tuple[str | None, int | None]]:
    """Lines `|-- Name  code  words`, indented by depth, below the root's line."""
    tree: dict[str, tuple[str | None, int | None]] = {}
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        hit = re.match(r"^([\s|]*)(?:[|`]-- )?([A-Z]\w+)\s+(\d+)?", line)
        if not hit or not (("-- " in line) or re.match(r"^\s*SurefootError\b", line)):
            continue
        depth = line.index(hit[2])
        while above and above[-1][0] >= depth:
            above.pop()
        tree[hit[2]] = (above[-1][1] if above else None, int(hit[3]) if hit[3] else None)
        above.append((depth, hit[2]))
    return tree


def _is_code(node: ast.Assign) -> bool:
    return (
        isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.startswith("EXIT_")
        and isinstance(node.value, ast.Constant)
    )


def _last(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]
