"""Every command that a message, hint or help text of surefoot names can be typed.

Its verb and its options exist.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from surefoot.cli.help import fill
from surefoot.cli.main import build_verbs
from surefoot.contract.spec import RunSpec, key_names
from surefoot.core.errors import SpecError

PACKAGE = Path(__file__).resolve().parents[2] / "surefoot"
COMMAND = re.compile(r"(?<![\w./-])surefoot ([a-z][a-z-]*)((?: (?!surefoot )[^\s;`)]+)*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
VALUE = "VALUE"  # what stands for an expression inside a text
# words behind `surefoot` that are no command: sentences about surefoot itself
SENTENCES = {
    "build",
    "cannot",
    "convert",
    "did",
    "does",
    "evaluates",
    "failed",
    "keeps",
    "reads",
    "tar",
    "watch",
}
EVERYWHERE = {"--help", "--traceback"}
# options of torchrun, srun, docker and nsys
OF_OTHERS = {
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--ntasks",
    "--ntasks-per-node",
    "--pid",
    "--capture-range",
    "--capture-range-end",
    "--cuda-memory-usage",
    "--export",
    "--force-overwrite",
    "--profile-from-start",
    "--trace",
}

KEY = re.compile(rf"(?<![\w./-])({'|'.join(RunSpec.model_fields)})\.([a-z_]+)\b(?!\()")
SETTING = re.compile(rf'{KEY.pattern} = ("[^"]*"|-?\d+(?:\.\d+)?|true|false)')
# behind the name of a table, and no key of it: files, attributes of a DataLoader, what a task of
# one's own takes
NO_KEYS = {
    "train.py",
    "checkpoint.py",
    "memory.json",
    "loader.dataset",
    "loader.collate_fn",
    "data.batch_size",
}


class Text(NamedTuple):
    """A text of the source, docstrings left out, with VALUE for each expression of an f-string."""

    where: str
    text: str


def find_texts(tree: ast.AST, name: str) -> Iterator[Text]:
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            inside.update(id(part) for part in node.values)
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values
            ]
            yield Text(f"{name}:{node.lineno}", "".join(parts))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield Text(f"{name}:{node.lineno}", node.value)


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    """Every text of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [
        text
        for path in files
        for text in find_texts(ast.parse(path.read_bytes()), str(path.relative_to(PACKAGE)))
    ]


def every_verb() -> dict[str, set[str]]:
    """The options of each verb, by its words: `bench step`."""
    group: Any = build_verbs()
    verbs: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        verbs |= (
            {f"{name} {verb}": each for verb, each in inner.items()} if inner else {name: command}
        )
    return {
        name: {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        | EVERYWHERE
        for name, command in verbs.items()
    }


def find_faults(text: Text, verbs: dict[str, set[str]]) -> Iterator[str]:
    """What is wrong with the commands of a text."""
    groups = {name.split()[0] for name in verbs if " " in name}
    for verb, rest in COMMAND.findall(text.text):
        words = rest.split()
        if verb in groups and words and f"{verb} {words[0].strip(',.:?')}" in verbs:
            verb = f"{verb} {words[0].strip(',.:?')}"
        if verb in verbs:
            yield from (
                f"{text.where}: surefoot {verb} has no {each}"
                for each in OPTION.findall(rest)
                if each not in verbs[verb]
            )
        elif verb not in groups | SENTENCES:
            yield f"{text.where}: there is no command surefoot {verb}"


def test_every_command_that_surefoot_names_has_its_verb_and_its_options(
    texts: list[Text],
) -> None:
    verbs = every_verb()
    assert [fault for text in texts for fault in find_faults(text, verbs)] == []
    assert sum(len(COMMAND.findall(text.text)) for text in texts) > 100  # they are found


def test_every_option_that_surefoot_names_is_one(texts: list[Text]) -> None:
    known = set().union(*every_verb().values()) | OF_OTHERS
    # others are words of a command for a process of ours
    told = [text for text in texts if " " in text.text]
    assert [
        f"{text.where}: {each}"
        for text in told
        for each in OPTION.findall(text.text)
        if each not in known
    ] == []


def find_unknown_keys(text: Text) -> Iterator[str]:
    """The keys that a text names and no table of a spec has.

    A [task] takes what its class takes.
    """
    for table, key in KEY.findall(text.text) if " " in text.text else ():
        if table != "task" and key not in key_names(table) and f"{table}.{key}" not in NO_KEYS:
            yield f"{text.where}: [{table}] has no {key}"


def find_wrong_values(text: Text) -> Iterator[str]:
    """The settings that a text names and a spec refuses, other keys apart.

    A key may have no effect beside the defaults.
    """
    for table, key, value in SETTING.findall(text.text):
        if table == "task" or VALUE in value:
            continue
        try:
            RunSpec.model_validate({table: {key: tomllib.loads(f"value = {value}")["value"]}})
        except SpecError as error:
            if (
                "has no effect" not in error.message
                and "with compute = 'fp32'" not in error.message
            ):
                yield f"{text.where}: {table}.{key} = {value}: {error.message}"


def test_every_key_of_a_spec_that_surefoot_names_is_one_and_takes_the_value_that_is_named(
    texts: list[Text],
) -> None:
    assert [fault for text in texts for fault in find_unknown_keys(text)] == []
    assert [fault for text in texts for fault in find_wrong_values(text)] == []
    assert sum(len(SETTING.findall(text.text)) for text in texts) > 50  # they are found


def test_a_key_or_a_value_that_is_not_there_is_found() -> None:
    broken = [
        "set optim.rate = 0.1",
        "see train.batches, or loader.worker",
        'set loader.kind = "fork"',
    ]
    assert [
        len([*find_unknown_keys(Text("a:1", text)), *find_wrong_values(Text("a:1", text))])
        for text in broken
    ] == [2, 2, 1]
    sound = [
        "set train.batch to 8",
        'set loader.kind = "thread"; or data.folder',
        "task.width = 3",
        "train.microbatch = VALUE",
    ]
    assert [
        [*find_unknown_keys(Text("a:1", text)), *find_wrong_values(Text("a:1", text))]
        for text in sound
    ] == [[]] * 4


@pytest.mark.parametrize(
    ("subject", "filled"),
    [
        ("digits", "surefoot train digits; surefoot resume RUN --fork NEW"),
        ("my task.py:Task", "surefoot train 'my task.py:Task'; surefoot resume RUN --fork NEW"),
        (
            "a run",
            "surefoot train 'TMP/a run/spec.toml'; surefoot resume 'TMP/a run' --fork NEW",
        ),
    ],
)
def test_a_hint_names_the_spec_or_run_that_was_typed(
    subject: str, filled: str, tmp_path: Path
) -> None:
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "spec.toml").touch()
    given = tmp_path / subject if subject == "a run" else Path(subject)
    made = fill("surefoot train SPEC; surefoot resume RUN --fork NEW", given)
    assert made.replace(str(tmp_path), "TMP") == filled


def test_a_command_that_is_not_there_is_found() -> None:
    verbs = every_verb()
    broken = [
        "surefoot no-such-verb",
        "see surefoot show RUN --no-such",
        "surefoot checkpoint check VALUE --fork X; surefoot prune",
    ]
    sound = [
        "surefoot resume VALUE --fork NEW",
        "surefoot train SPEC --ranks N; or --fresh",
        "`surefoot data check PATH`, --any",
    ]
    assert [len(list(find_faults(Text("a:1", text), verbs))) for text in broken] == [1, 1, 2]
    assert [list(find_faults(Text("a:1", text), verbs)) for text in sound] == [[], [], []]
