"""A task's parameters are read from its source, which is never run.

What cannot be seen is left to the import.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from surefoot.contract import signature, spec_file
from surefoot.contract.task import load
from surefoot.core.errors import InputError, SpecError, TaskError


def names(folder: Path, source: str, name: str = "Mine") -> list[str] | None:
    """The parameters of a class in a file whose code must never run."""
    path = folder / "mine.py"
    path.write_text("raise SystemExit('this code ran')\n" + textwrap.dedent(source))
    found = signature.find_parameters(f"{path}:{name}")
    return None if found is None else [parameter.name for parameter in found]


BASE = "class Base:\n    def __init__(self, width): ...\n"
SEEN = {
    "no constructor": ("class Mine: ...", []),
    "plain": (
        "class Mine:\n    def __init__(self, width, depth: int = 3): ...",
        ["width", "depth"],
    ),
    "only by name": (
        "class Mine:\n    def __init__(self, width, *, depth=3): ...",
        ["width", "depth"],
    ),
    "only by position": (
        "class Mine:\n    def __init__(self, width, /, depth=3): ...",
        ["width", "depth"],
    ),
    "a dataclass": (
        "@dataclass\nclass Mine:\n    width: int\n    depth: int = 3\n    def model(self): ...",
        ["width", "depth"],
    ),
    "a frozen dataclass": (
        "@dataclasses.dataclass(frozen=True)\nclass Mine:\n    width: int = 4",
        ["width"],
    ),
    "inherited": (f"{BASE}class Mine(Base): ...", ["width"]),
    "overruled": (
        f"{BASE}class Mine(Base):\n    def __init__(self, depth): ...",
        ["depth"],
    ),
}
UNSEEN = {
    "whatever comes": "class Mine:\n    def __init__(self, **rest): ...",
    "a base from elsewhere": "from elsewhere import Base\nclass Mine(Base): ...",
    "a dataclass with a base": "@dataclass\nclass Mine(Base):\n    width: int",
    "a name from elsewhere": "from elsewhere import Mine",
    "a name of another": "import elsewhere\nMine = elsewhere.Other",
    "everything from elsewhere": "from elsewhere import *",
    "a class under a condition": (
        "if True:\n    class Mine:\n        def __init__(self, width): ..."
    ),
    "a class in a try": "try:\n    class Mine: ...\nexcept ImportError:\n    class Mine: ...",
    "a name with a type": "Mine: type = make()",
    "two names at once": "Mine, Other = make()",
    "a base of its own": "class Mine(Mine): ...",
    "a subscripted base": "class Mine(Generic[T]): ...",
}


@pytest.mark.parametrize("what", SEEN)
def test_parameters_are_read_without_running_the_file(what: str, tmp_path: Path) -> None:
    source, expected = SEEN[what]
    found = names(tmp_path, source)
    assert found is not None
    assert found[: len(expected)] == expected


def test_a_class_on_top_of_a_built_in_task_has_its_parameters(tmp_path: Path) -> None:
    builtin = signature.find_parameters("digits")
    assert builtin is not None
    found = names(tmp_path, "from surefoot.tasks.digits import Digits\nclass Mine(Digits): ...")
    assert found == [parameter.name for parameter in builtin]


@pytest.mark.parametrize("what", UNSEEN)
def test_what_cannot_be_seen_without_an_import_is_left_to_it(what: str, tmp_path: Path) -> None:
    assert names(tmp_path, UNSEEN[what]) is None


BROKEN = {
    "bad grammar": "def (",
    "a null byte": "x = '\0'",
    "no text": "\udcff",
    "deep nesting": "x = " + "(" * 2000 + ")" * 2000,
    "a giant number": "x = " + "9" * 5000,
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_not_python_is_refused_in_words(what: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(BROKEN[what].encode("utf-8", "surrogateescape"))
    with pytest.raises(TaskError) as caught:
        signature.find_parameters(f"{tmp_path / 'mine.py'}:Mine")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "use",
    [
        "digit",
        "no.py:Mine",
        ":Mine",
        "..:Mine",
        "a..b:Mine",
        ".:Mine",
        "/:Mine",
        "\0:Mine",
        "x" * 5000 + ":Mine",
        "x" * 5000 + ".py:Mine",
        "mine.py:",
        "a:b:c",
        " :Mine",
    ],
)
def test_a_name_of_any_form_is_found_or_refused_in_words(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        found = signature.find_parameters(use)
    except InputError as error:
        found = None if error.hint else []
    assert found is None


@pytest.mark.parametrize("listed", ["[]", "[*others]", "names()", "['Mine'] + more", "3"])
def test_a_list_of_public_names_of_any_form_is_no_stumbling_block(
    listed: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        f"__all__ = {listed}\nclass Mine:\n    def __init__(self, width): ...\n"
    )
    found = signature.find_parameters(f"{tmp_path / 'mine.py'}:")
    assert found is not None
    assert [parameter.name for parameter in found] == ["width"]


# annotation, what fits it, what does not
TYPES: list[tuple[str, list[Any], list[Any]]] = [
    ("int", [3, -1], [3.0, "3", True, None, [3]]),
    ("float", [3, 3.5], ["3", True, None]),
    ("str", ["x"], [3, None, ["x"]]),
    ("bool", [True], [1, "true", None]),
    ("int | None", [3, None], ["3", 3.5]),
    ("Optional[str]", ["x", None], [3]),
    ("typing.Optional[str]", ["x", None], [3]),
    ("list[int]", [[1]], [1, "1"]),
    ("tuple[int, ...]", [[1], (1,)], [1]),
    ("Sequence[str]", [["a"]], ["a"]),
    ("dict[str, int]", [{"a": 1}], [["a"]]),
    ("Mapping[str, int]", [{"a": 1}], [3]),
    ("'int'", [3], ["3"]),
    ('"int | None"', [3, None], ["3"]),
    ("Literal['a', 'b']", ["a"], ["c", 3]),
    ("Literal[1]", [1], [2]),
    ("Literal[Kind.A]", ["anything"], []),
    ("Path", ["here"], []),
    ("'not valid ['", ["anything"], []),
    ("Union[int, str]", [3, "x"], [None, 3.5]),
    ("None", [None], [3]),
    ("Any", [3, "x", None], []),
    ("numpy.ndarray", [[1]], []),
    ("Annotated[int, 'of something']", [3], ["3"]),
]


@pytest.mark.parametrize(("annotation", "fits", "does_not"), TYPES)
def test_a_value_is_held_against_its_annotation(
    annotation: str, fits: list[Any], does_not: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"class Mine:\n    def __init__(self, it: {annotation}): ...\n")
    for value in fits:
        signature.check(f"{path}:Mine", {"it": value}, {})
    for value in does_not:
        with pytest.raises(SpecError, match=r"task\.it is") as caught:
            signature.check(f"{path}:Mine", {"it": value}, {"task.it": "mine.toml:3"})
        assert caught.value.message.startswith("mine.toml:3: ")


def test_an_unknown_and_a_missing_parameter_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    def __init__(self, folder, width, depth=3): ...\n")
    with pytest.raises(SpecError, match="no parameter 'widht'") as caught:
        signature.check(f"{path}:Mine", {"widht": 3}, {})
    assert "did you mean 'width'" in str(caught.value)
    with pytest.raises(SpecError, match="needs width"):
        signature.check(f"{path}:Mine", {"depth": 3}, {})
    signature.check(f"{path}:Mine", {"width": 3}, {})  # the folder comes from [data]
    assert signature.has_parameter(f"{path}:Mine", "folder") is True


DATASET = "class Rows(Dataset):\n    def __len__(self): ...\n    def __getitem__(self, i): ...\n"
NET = "class Net(nn.Module):\n    def forward(self, x): ...\n    def loss(self, x): ...\n"
PARTS = "".join(
    f"    def {name}: ...\n"
    for name in ("model(self)", "data(self, split)", "forward(self, m, b)", "loss(self, o, b)")
)
SUGGESTED = {
    "a dataset first": (
        f"{DATASET}class Mine:\n{PARTS}",
        "mine.py",
        "name its class: mine.py:Mine",
    ),
    "a model first": (f"{NET}class Mine:\n{PARTS}", "mine.py", "name its class: mine.py:Mine"),
    "methods of a base": (
        f"{NET}class Base:\n{PARTS}class Own(Base): ...\n",
        "mine.py",
        "name one of its classes: mine.py:Base or mine.py:Own",
    ),
    "on a built-in task": (
        f"class Own(Digits):\n    def loss(self, o, b): ...\n{DATASET}",
        "mine.py",
        "name its class: mine.py:Own",
    ),
    "a path with a space": (
        f"{DATASET}class Mine:\n{PARTS}",
        "my own/mine.py",
        "name its class: 'my own/mine.py:Mine'",
    ),
    "a task of updates beside one of four methods": (
        (
            f"class Mine:\n{PARTS}class Gan:\n    def model(self): ...\n"
            "    def data(self, split): ...\n    def updates(self, model): ...\n"
        ),
        "mine.py",
        "name one of its classes: mine.py:Mine or mine.py:Gan",
    ),
    "no class": (
        "import os\n",
        "mine.py",
        "the file has no class; surefoot init NEW writes a file with a task",
    ),
}


@pytest.mark.parametrize("name", ["Gan", "GAN", "gan", "Gann"])
def test_a_class_is_found_by_a_name_in_another_case(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(f"class Net:\n{PARTS}class Gan:\n{PARTS}")
    assert signature.suggest_class(Path("mine.py"), name) == "name its class: mine.py:Gan"


@pytest.mark.parametrize("what", SUGGESTED)
def test_the_class_that_is_suggested_is_the_task_as_a_shell_takes_it(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, name, hint = SUGGESTED[what]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    refused = [
        (SpecError, lambda: spec_file.read(name)),
        (TaskError, lambda: signature.find_parameters(name)),
        (TaskError, lambda: signature.find_parameters(f"{name}:Nothing")),
    ]
    if path.parent == tmp_path:
        refused.append((TaskError, lambda: signature.find_parameters("mine")))
    for kind, call in refused:
        with pytest.raises(kind) as raised:
            call()
        assert raised.value.hint == hint


def test_a_class_that_is_no_task_names_the_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text(f"class Rows: ...\nclass Mine:\n{PARTS}")
    with pytest.raises(TaskError, match="task Rows has no method model") as raised:
        load("beside.py:Rows", {})
    assert str(raised.value.hint).startswith("name its class: beside.py:Mine; a task has model()")


def test_a_module_in_the_current_folder_is_found_and_a_missing_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    (tmp_path / "own_package").mkdir()
    for name in ("own_module.py", "own_package/inner.py"):
        (tmp_path / name).write_text(f"class Mine:\n{PARTS}")
    assert load("own_module:Mine", {}).name == "mine"
    assert load("own_package.inner:Mine", {}).name == "mine"
    with pytest.raises(TaskError, match=r"No module named 'own_package\.other'") as raised:
        load("own_package.other:Mine", {})
    assert "name its file: own_package/other.py:Mine" in str(raised.value.hint)
