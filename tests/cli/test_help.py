"""What a person meets first: help, errors of the command line, pipes, completion."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer

from surefoot.cli.help import Verb, Verbs
from surefoot.cli.main import build_verbs
from tests.cli.conftest import Command
from tests.cli.reference import CLI, ROOT, sections

VERBS = ("demo", "init", "train", "resume", "evaluate", "predict")
VERBS += ("runs", "show", "compare", "why", "report", "ledger", "profile")
VERBS += ("verify", "prove", "roofline", "explain", "formats", "memory", "tune-loader")
VERBS += ("whatif batch", "whatif compile", "whatif kernels", "whatif activation-checkpointing")
VERBS += ("whatif fit", "whatif noise")
VERBS += ("bench step", "bench comm", "ladder", "spec show", "spec schema", "spec check")
VERBS += ("check", "archive", "remove")
VERBS += ("checkpoint list", "checkpoint show", "checkpoint check", "checkpoint prune")
VERBS += ("checkpoint diff", "checkpoint export", "checkpoint import")
VERBS += ("data convert", "data index", "data check", "data bench", "data stage")
COMMON = {"--json", "--traceback"}
SHARED = {*COMMON, "--set", "--seed", "--data", "--task", "--quiet"}  # of most verbs


def parameters(verb: str) -> list[object]:
    command = build_verbs()
    for word in verb.split():
        command = command.commands[word]
    return [each for each in command.params if each.name != "help"]


def flags(verb: str) -> set[str]:
    return {flag for each in parameters(verb) for flag in each.opts if flag.startswith("--")}  # type: ignore[attr-defined]


def shown_flags(verb: str) -> set[str]:
    """The flags in the help of a verb; a hidden one names what is the default."""
    hidden = {
        flag for each in parameters(verb) if getattr(each, "hidden", False) for flag in each.opts
    }  # type: ignore[attr-defined]
    return flags(verb) - hidden


def test_help_names_every_verb_in_the_group_of_what_a_person_wants(surefoot: Command) -> None:
    answer = surefoot("--help")
    assert answer.code == 0
    groups = re.findall(r"─ (\w+) ─", answer.out)
    assert groups == ["Options", "Train", "Inspect", "Measure", "Improve", "Prove", "Manage"]
    assert len(build_verbs().commands) <= 32
    for group, verb in (("Train", "train"), ("Inspect", "show"), ("Prove", "verify")):
        assert re.findall(r"─ (\w+) ─", answer.out[: answer.out.index(f"│ {verb} ")])[-1] == group
    assert {verb.split()[0] for verb in VERBS} == set(build_verbs().commands)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_help_of_a_verb_explains_each_flag_and_hides_types(
    verb: str, columns: str, surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    answer = surefoot(*verb.split(), "--help")
    assert answer.code == 0
    assert max(map(len, answer.out.splitlines())) <= int(columns)
    assert not any(word in answer.out for word in ("<bool>", "<str>", "<path>", "<list", "TEXT"))
    for each in parameters(verb):
        assert each.help, each.name  # type: ignore[attr-defined]
    assert all(flag in answer.out for flag in shown_flags(verb))


BRACKETS = re.compile(r"\[[^\]]*\]")


@pytest.mark.parametrize("verb", VERBS)
def test_no_word_in_brackets_is_lost_from_the_help_of_a_verb(
    verb: str, surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # no line is broken
    shown = surefoot(*verb.split(), "--help").out
    command = build_verbs()
    for word in verb.split():
        command = command.commands[word]
    texts = [command.help or "", *(each.help for each in parameters(verb))]  # type: ignore[attr-defined]
    assert [word for text in texts for word in BRACKETS.findall(text) if word not in shown] == []


def test_words_in_brackets_are_shown_in_every_place_of_a_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tried = typer.Typer(
        cls=Verbs, help="Group [one].", epilog="End [two].", rich_markup_mode="rich"
    )

    @tried.command(cls=Verb)
    def verb(given: Annotated[str, typer.Option(help="an option of [three]")] = "") -> None:
        """Verb [four].

        More [five].
        """

    @tried.command(cls=Verb)
    def other() -> None: ...

    for words, expected in (("--help", "one two four"), ("verb --help", "three four five")):
        tried(words.split(), standalone_mode=False)
        shown = capsys.readouterr().out
        assert [word for word in expected.split() if f"[{word}]" not in shown] == []


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("spec schema", "remove")])
def test_every_verb_has_json_and_traceback(verb: str) -> None:
    assert flags(verb) >= COMMON


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_at_most_10_flags_beside_the_common_ones(verb: str) -> None:
    shown = shown_flags(verb)
    assert len(shown - SHARED) <= 10, sorted(shown - SHARED)


@pytest.mark.parametrize("verb", VERBS)
def test_the_reference_names_every_flag_of_a_verb(verb: str) -> None:
    text = CLI.read_text()
    mine = next(
        (body for title, body in sections(CLI).items() if title.startswith(f"surefoot {verb}")),
        None,
    )
    assert mine is not None, f"docs/reference/cli.md has no section for {verb}"
    named = mine + text.split("## surefoot")[0]
    if verb == "predict":  # "flags as for evaluate"
        named += sections(CLI)["surefoot evaluate RUN"]
    assert [flag for flag in flags(verb) if f"`{flag}" not in named] == []


@pytest.mark.parametrize(
    "words",
    [
        ("shwo",),
        ("show",),
        ("spec", "shwo"),
        ("runs", "--jsn"),
        ("train", "digits", "--steps", "x"),
        ("compare",),
    ],
)
def test_a_command_line_that_cannot_be_read_is_bad_input(
    words: tuple[str, ...], surefoot: Command
) -> None:
    answer = surefoot(*words)
    assert (answer.code, answer.out) == (2, "")
    assert "--help' for help" in answer.err


def test_an_error_shows_where_it_was_raised_only_on_traceback(surefoot: Command) -> None:
    plain, traced = surefoot("show", "nowhere"), surefoot("show", "nowhere", "--traceback")
    assert plain.err.startswith("error: nowhere does not exist")
    assert "Traceback (most recent call last)" in traced.err
    assert traced.err.endswith(plain.err)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_the_common_shells(
    shell: str, surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what --show-completion does once it has found out the shell
    monkeypatch.setenv("_SUREFOOT_COMPLETE", f"source_{shell}")
    answer = surefoot()
    assert answer.code == 0
    assert "_SUREFOOT_COMPLETE" in answer.out


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", **more}


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("surefoot tr", ["train"]),
        ("surefoot spec s", ["show", "schema"]),
        ("surefoot train dig", ["digits"]),
    ],
)
def test_a_shell_is_offered_what_fits_without_waiting_for_torch(
    typed: str, offered: list[str]
) -> None:
    words = {
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
        "_SUREFOOT_COMPLETE": "complete_bash",
    }
    command = [sys.executable, "-X", "importtime", "-m", "surefoot"]
    done = subprocess.run(
        command, env=environment(**words), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == offered
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_a_reader_who_leaves_early_is_no_failure(tmp_path: Path) -> None:
    for words in ("spec schema", "spec check digits"):
        for unbuffered in ("", "1"):
            script = f'"{sys.executable}" -m surefoot {words} | true; exit ${{PIPESTATUS[0]}}'
            done = subprocess.run(
                ["bash", "-c", script],
                cwd=tmp_path,
                env=environment(PYTHONUNBUFFERED=unbuffered),
                capture_output=True,
                text=True,
                check=False,
            )
            assert (done.returncode, done.stderr) == (0, "")


LIGHT = """
import sys
from surefoot.cli.main import main
for words in {words!r}:
    sys.argv = ["surefoot", *words]
    try:
        main()
    except SystemExit as left:
        assert left.code == 0, words
heavy = sorted({{"torch", "numpy", "sklearn"}} & set(sys.modules))
assert not heavy, heavy
"""


def test_help_and_every_looking_verb_work_without_torch_and_numpy(tmp_path: Path) -> None:
    from tests.cli import past_runs

    for name in "ab":
        past_runs.write_finished(tmp_path / "runs" / name)
    words = [
        ["--help"],
        ["train", "--help"],
        ["runs"],
        ["show", "runs/a"],
        ["compare", "runs/a", "runs/b"],
        ["init", "mine"],
        ["spec", "show", "digits", "--compare", "step,exponential,cosine,plateau"],
        ["spec", "check", "mine/my_spec.toml"],
        ["spec", "schema"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(words=words)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_of_two_values_that_set_gives_a_key_the_last_one_counts(surefoot: Command) -> None:
    answer = surefoot(
        *shlex.split("spec show digits --set optim.lr=0.1 --set optim.lr=0.2 --json --json")
    )
    assert [each["value"] for each in answer.row["values"] if each["key"] == "optim.lr"] == [0.2]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("spec", "show", "digits", "--steps", "3", "--steps=6"),
            "--steps is given 2 times (3, 6)",
        ),
        (
            ("spec", "check", "digits", "--seed", "1", "--seed", "1", "--seed", "2"),
            "--seed is given 3 times (1, 1, 2)",
        ),
        (
            ("verify", "nothing", "--kills", "1", "--kills=2"),
            "--kills is given 2 times (1, 2)",
        ),
        (
            ("checkpoint", "prune", "nothing", "--keep", "3", "--keep", "2"),
            "--keep is given 2 times (3, 2)",
        ),
        (
            ("spec", "show", "digits", "--set", "optim.lr=1.0", "--set", "optim.lr=2.0"),
            "optim.lr is given 2 times (1.0 by --set, 2.0 by --set)",
        ),
        (
            ("spec", "show", "digits", "--seed", "2", "--set", "train.seed=1"),
            "train.seed is given 2 times (1 by --set, 2 by --seed)",
        ),
        (
            ("memory", "nothing", "--quiet", "--fit", "1GiB", "--fit", "\x1b[31m"),
            "--fit is given 2 times (1GiB, '\\x1b[31m')",
        ),
    ],
)
def test_of_an_option_with_several_values_the_last_one_counts_and_is_named(
    words: tuple[str, ...], line: str, surefoot: Command
) -> None:
    answer = surefoot(*words)
    assert answer.err.startswith(f"warning: {line}: the last value is used\n"), answer.err
    assert "given" not in answer.out


@pytest.mark.parametrize(
    "words",
    [
        ("--steps", "3", "--steps", "3"),
        ("--json", "--json"),
        ("--set", "optim.lr=0.1", "--set", "optim.weight_decay=0.1"),
        ("--set", "train.seed=1", "--seed", "1"),
    ],
)
def test_a_value_that_is_given_again_is_not_named(
    words: tuple[str, ...], surefoot: Command
) -> None:
    answer = surefoot("spec", "show", "digits", *words)
    assert (answer.code, answer.err) == (0, "")


@pytest.mark.parametrize(
    ("verb", "whole"),
    [("export", "checkpoint export"), ("prune", "checkpoint prune"), ("validate", "")],
)
def test_a_verb_that_only_a_group_has_is_named_with_its_group(
    verb: str, whole: str, surefoot: Command
) -> None:
    answer = surefoot(verb, "a-run")
    assert answer.code == 2
    assert f"No such command '{verb}'" in answer.err
    assert (f"It is {whole}." in answer.err) == bool(whole)
