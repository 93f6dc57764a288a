"""Tests of the public names.

Each is documented, stands in docs/reference/api.md, and its module has nothing of its own.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import surefoot
from tests.docs import api_page, public_api
from tests.laws.sizes import PUBLIC

PACKAGE = Path(surefoot.__file__).parent


def test_the_page_of_public_names_is_what_the_docstrings_say() -> None:
    assert api_page.PAGE.read_text() == api_page.make(), "run python -m tests.docs.api_page"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_module_of_public_names_only_imports_them_and_each_is_documented(name: str) -> None:
    module = importlib.import_module(f"surefoot.{name}")
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    # names of the previous release come from a __getattr__ that type checkers do not see
    old = [ast.unparse(node) for node in tree.body if isinstance(node, ast.If)]
    assert set(old) <= {"if not TYPE_CHECKING:\n    __getattr__ = renamed_in(__name__)"}
    assert {type(node) for node in tree.body} <= {ast.Expr, ast.ImportFrom, ast.Assign, ast.If}
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } - {"annotations", "TYPE_CHECKING", "renamed_in"}
    assert sorted(imported) == module.__all__
    assert [each for each in module.__all__ if not api_page.describe(getattr(module, each))] == []
    assert getattr(surefoot, name) is module


def find_documented(value: Any) -> tuple[list[str], list[str]]:
    """Return the parameters that `Args:` of a class or function must list, and those it lists.

    One parameter alone needs no section. Event records have none, since docs/reference/events.md
    lists their fields, and neither has a class whose constructor is not of this package: that of a
    protocol, of torch, or of pydantic, whose fields docs/reference/spec.md lists.
    """
    listed = list(api_page.read_items(inspect.getdoc(value) or "", "Args"))
    made_by = value.__init__ if inspect.isclass(value) else value
    is_foreign = not (getattr(made_by, "__module__", None) or "").startswith(("surefoot", "tests"))
    if is_foreign or (inspect.isclass(value) and issubclass(value, surefoot.events.Event)):
        return [], listed
    taken = list(inspect.signature(value).parameters)
    return ([] if len(taken) == 1 and not listed else taken), listed


def test_each_parameter_of_a_public_name_is_documented() -> None:
    wrong = {
        f"{home}.{name}": (taken, listed)
        for home, names in api_page.find_names().items()
        for name, value in names.items()
        if callable(value)
        for taken, listed in [find_documented(value)]
        if taken != listed
    }
    assert wrong == {}


def test_no_docstring_of_a_function_lists_a_parameter_that_it_does_not_have() -> None:
    stale, num_read = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "Args:" in text else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                taken = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
                listed = api_page.read_items(ast.get_docstring(node) or "", "Args")
                num_read += len(listed)
                stale += [f"{path.name}: {node.name}: {name}" for name in listed.keys() - taken]
    assert num_read > 100
    assert stale == []


def test_each_exception_that_a_public_name_raises_exists() -> None:
    raised = {
        name
        for names in api_page.find_names().values()
        for value in names.values()
        for name in api_page.read_items(inspect.getdoc(value) or "", "Raises")
    }
    assert len(raised) > 5
    assert [name for name in sorted(raised) if not hasattr(surefoot.core.errors, name)] == []


DOCUMENTED = "Read rows.\n\nArgs:\n    rows: Rows,\n        or a slice.\n    *more: Others."


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (DOCUMENTED, True),
        (DOCUMENTED.replace("rows:", "lines:"), False),  # a previous name
        (DOCUMENTED.replace("*more: Others.", ""), False),
        ("Read rows.", False),
        (DOCUMENTED + "\n    fast: A parameter that is gone.", False),
    ],
)
def test_a_parameter_without_text_and_a_stale_one_are_found(text: str, is_right: bool) -> None:
    def read(rows: slice, *more: slice) -> None: ...

    read.__doc__ = text
    taken, listed = find_documented(read)
    assert (taken == listed) is is_right, (taken, listed)


def test_examples_and_documents_import_public_names_alone() -> None:
    root = PACKAGE.parent
    files = [
        root / "README.md",
        *(root / "docs" / "guides").glob("*.md"),
        *(root / "examples").rglob("*.py"),
    ]
    inside = (
        "surefoot.components",
        "surefoot.runtime",
        "surefoot.contract",
        "surefoot.core.place",
        "surefoot.core.ranks",
    )
    assert [
        f"{path.name}: {part}" for path in files for part in inside if part in path.read_text()
    ] == []


def test_a_change_of_the_public_api_stands_in_the_changelog() -> None:
    """Its names and their parameters are compared with those of the last release."""
    before = public_api.SNAPSHOT.read_text().splitlines()
    changelog = (PACKAGE.parent / "CHANGELOG.md").read_text()
    assert public_api.find_untold(before, public_api.find_lines(), changelog) == []


@pytest.mark.parametrize(
    ("now", "section", "untold"),
    [
        ("surefoot.data.read(path, fast)", "", 2),  # a parameter with another name
        ("surefoot.data.load(path)", "- `load` reads a file.", 1),  # the old name is not told
        ("surefoot.data.load(path)", "- `surefoot.data.load` was `read`.", 0),
        ("surefoot.data.read(path=)", "- `read(path)` may leave `path` out.", 0),
        ("surefoot.data.read(path=)", "- read may leave the path out.", 2),
        ("surefoot.data.read(path=)", "\n## 0.1\n\n- `read` is new.", 2),  # an older release
    ],
)
def test_a_planted_change_of_the_public_api_is_named(now: str, section: str, untold: int) -> None:
    before = ["surefoot.data.read(path)"]
    found = public_api.find_untold(before, [now], f"# Changes\n\n## Unreleased\n\n{section}\n")
    assert len(found) == untold, found
