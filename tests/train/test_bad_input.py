"""A spec or a flag that makes no sense is refused with code 2, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.small import call, entries, write_task

Said = pytest.CaptureFixture[str]


def refused(monkeypatch: pytest.MonkeyPatch, capsys: Said, tmp_path: Path, *words: str) -> str:
    """Train, see that it is refused before anything was written, and give what was said."""
    monkeypatch.chdir(tmp_path)
    before = entries(tmp_path)
    assert call(monkeypatch, "train", *words) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    lines = [
        line
        for line in said.err.splitlines()
        if not (line.startswith("warning: ") and " is given 2 times (" in line)
    ]
    assert lines[0].startswith("error: ")
    assert said.out == ""
    assert entries(tmp_path) == before
    return said.err


# ---- the spec, through the command line

VALUES = {
    "not a number": ("optim.lr=nan", ["optim.lr is nan", "finite"]),
    "infinite": ("optim.lr=inf", ["optim.lr is inf", "finite"]),
    "negative": ("optim.lr=-0.1", ["optim.lr is -0.1", "greater than or equal to 0"]),
    "negative steps": ("train.length='-5 steps'", ["train.length", "-5"]),
    "no steps": ("train.length='0 steps'", ["train.length: 0 steps is zero", "at least 1 step"]),
    "no epochs": ("train.length='0 epochs'", ["train.length: 0 epochs is zero"]),
    "over before it begins": (
        "train.length='0.0001 s'",
        ["length = 0.0001 s ends before the first step", "1 step"],
    ),
    "evaluated every nothing": (
        "evaluate.every='0 steps'",
        ["evaluate.every: 0 steps is zero", "at least 1 step"],
    ),
    "saved every nothing": ("checkpoint.every='0 s'", ["checkpoint.every: 0 s is zero"]),
    "kept every nothing": (
        "checkpoint.keep_every='0 epochs'",
        ["checkpoint.keep_every: 0 epochs is zero"],
    ),
    "told every nothing": ("observe.every='0 steps'", ["observe.every: 0 steps is zero"]),
    "no unit": ("train.length=5", ["train.length: 5 is not a duration"]),
    "an unknown unit": ("train.length='5 years'", ["train.length", "years"]),
    "not a number of steps": ("train.length='nan steps'", ["train.length", "nan"]),
    "a text for a number": ("optim.lr=fast", ["optim.lr is 'fast'", "number"]),
    "a number for a text": ("evaluate.split=3", ["evaluate.split is 3", "string"]),
    "a fraction of a batch": ("train.batch=2.5", ["train.batch is 2.5", "integer"]),
    "no batch": ("train.batch=0", ["train.batch is 0", "greater than 0"]),
    "a word for a switch": ("data.shuffle=yes", ["data.shuffle is 'yes'"]),
    "an unknown key": (
        "optim.learning_rate=1",
        ["'learning_rate' is not a key in [optim]", "allowed: "],
    ),
    "an unknown table": ("optimizer.lr=1", ["'optimizer' is not a table", "did you mean 'optim'"]),
    "an unknown parameter": ("task.widht=2", ["no parameter 'widht'", "did you mean 'width'"]),
    "a parameter of a different type": ("task.width=wide", ["task.width is 'wide'", "int"]),
    "two ways to clip": ("optim.clip_value=1.0", ["clip", "contradict"]),
    "a microbatch that does not divide": (
        "train.microbatch=3",
        ["microbatch = 3 does not divide batch = 4", "[1, 2, 4]"],
    ),
    "a schedule longer than the run": ("schedule.warmup='100 steps'", ["schedule.warmup", "100"]),
    "an unknown score": ("evaluate.score=f1", ["evaluate.score is 'f1'"]),
    "a pattern that fits nothing": (
        "optim.freeze=['head.*']",
        ["optim.freeze", "'head.*'", "matches no parameter"],
    ),
    "all of it frozen": ("optim.freeze=['*']", ["trains no parameter"]),
    "a folder the task does not take": ("data.folder=here", ["has no parameter 'folder'"]),
    "no value": ("optim.lr", ["is not table.key=value"]),
    "no table": ("lr=0.1", ["is not table.key=value"]),
    "a device that is not here": ("train.device=tpu", ["train.device is 'tpu'"]),
    "a seed below zero": ("train.seed=-1", ["train.seed is -1"]),
}


@pytest.mark.parametrize("what", VALUES)
def test_a_spec_that_makes_no_sense_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    change, expected = VALUES[what]
    said = refused(
        monkeypatch,
        capsys,
        tmp_path,
        write_task(tmp_path),
        "--set",
        "train.batch=4",
        "--set",
        change,
    )
    for words in expected:
        assert words in said
    assert "hint: " in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--steps", "-5"), "-5"),
        (("--steps", "0"), "at least 1 step"),
        (("--steps", "many"), "valid integer"),
        (("--seed", "-1"), "train.seed is -1"),
        (("--data", "/no/such/folder"), "no parameter 'folder'"),
        (("--sett", "a.b=1"), "--set"),
        (("two", "three"), "three"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused(
    words: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Said,
) -> None:
    task = write_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "train", task, *words) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert "Traceback" not in said
    assert entries(tmp_path) == ["mine.py"]


def test_a_spec_file_with_nothing_right_names_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    write_task(tmp_path)
    (tmp_path / "mine.toml").write_text(
        '[task]\nuse = "mine.py:Mine"\n\n[optim]\nname = "adamw"\nlr = nan\n'
    )
    said = refused(monkeypatch, capsys, tmp_path, str(tmp_path / "mine.toml"))
    assert "mine.toml:6: optim.lr is nan" in said
