"""Every command that a message, a hint or a help text of surefoot names can be typed: its verb and its options exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from surefoot.cli.main import app

PACKAGE = Path(__file__).resolve().parents[2] / "surefoot"
COMMAND = re.compile(r"(?<![\w./-])surefoot ([a-z][a-z-]*)((?: (?!surefoot )[^\s;`)]+)*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
VALUE = "VALUE"  # what stands for an expression inside a text
GROUPS = {"bench", "checkpoint", "data", "spec"}
# words behind `surefoot` that are no command: sentences about surefoot itself
SENTENCES = {"build", "cannot", "convert", "did", "does", "evaluates", "failed", "keeps", "reads", "tar", "watch"}
EVERYWHERE = {"--help", "--traceback"}
# options of torchrun, srun, docker and nsys
OF_OTHERS = {
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--ntasks", "--ntasks-per-node", "--pid", "--capture-range",
    "--capture-range-end", "--cuda-memory-usage", "--export", "--force-overwrite", "--profile-from-start", "--trace",
}  # fmt: skip


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
            parts = [str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values]
            yield Text(f"{name}:{node.lineno}", "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield Text(f"{name}:{node.lineno}", node.value)


def every_text() -> list[Text]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [text for path in files for text in find_texts(ast.parse(path.read_bytes()), str(path.relative_to(PACKAGE)))]


def every_verb() -> dict[str, set[str]]:
    """The options of each verb, by its words: `bench step`."""
    group: Any = typer.main.get_command(app)
    verbs: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        verbs |= {f"{name} {verb}": each for verb, each in inner.items()} if inner else {name: command}
    return {
        name: {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | EVERYWHERE
        for name, command in verbs.items()
    }


def find_faults(text: Text, verbs: dict[str, set[str]]) -> Iterator[str]:
    """What is wrong with the commands of a text."""
    for verb, rest in COMMAND.findall(text.text):
        words = rest.split()
        if verb in GROUPS and words and f"{verb} {words[0].strip(',.:?')}" in verbs:
            verb = f"{verb} {words[0].strip(',.:?')}"
        if verb in verbs:
            yield from (
                f"{text.where}: surefoot {verb} has no {each}" for each in OPTION.findall(rest) if each not in verbs[verb]
            )
        elif verb not in GROUPS | SENTENCES:
            yield f"{text.where}: there is no command surefoot {verb}"


def test_every_command_that_surefoot_names_has_its_verb_and_its_options() -> None:
    verbs, texts = every_verb(), every_text()
    assert [fault for text in texts for fault in find_faults(text, verbs)] == []
    assert sum(len(COMMAND.findall(text.text)) for text in texts) > 100  # they are found


def test_every_option_that_surefoot_names_is_one() -> None:
    known = set().union(*every_verb().values()) | OF_OTHERS
    told = [text for text in every_text() if " " in text.text]  # others are words of a command for a process of ours
    assert [f"{text.where}: {each}" for text in told for each in OPTION.findall(text.text) if each not in known] == []


def test_a_command_that_is_not_there_is_found() -> None:
    verbs = every_verb()
    broken = [
        "surefoot no-such-verb",
        "see surefoot show RUN --no-such",
        "surefoot checkpoint check VALUE --fork X; surefoot prune",
    ]
    sound = ["surefoot resume VALUE --fork NEW", "surefoot train SPEC --ranks N; or --fresh", "`surefoot data check PATH`, --any"]
    assert [len(list(find_faults(Text("a:1", text), verbs))) for text in broken] == [1, 1, 2]
    assert [list(find_faults(Text("a:1", text), verbs)) for text in sound] == [[], [], []]
