"""Tests of a project that was moved, or is gone.

Verbs that need no task work, and the others are told where it is now by one option.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

import surefoot as library
from surefoot.contract import manifest
from surefoot.core.errors import TaskError
from tests.cli.conftest import Command
from tests.train.small import FEW, write_task


@pytest.fixture
def moved(surefoot: Command, tmp_path: Path) -> str:
    """An unfinished run below `run`, whose task was moved; gives where it is now."""
    (tmp_path / "old").mkdir()
    task = write_task(tmp_path / "old")
    done = surefoot(
        "train",
        task,
        *FEW,
        "--set",
        "checkpoint.every=2 steps",
        "--set",
        "task.width=6",
        "--run",
        "run",
        "--quiet",
    )
    assert done.code == 0, done.err
    lines = Path("run/events.jsonl").read_text().splitlines(keepends=True)
    Path("run/events.jsonl").write_text("".join(lines[:-1]))
    shutil.move(tmp_path / "old", tmp_path / "new")
    return "new/mine.py:Mine"


@pytest.mark.parametrize(
    "verb",
    [
        "show",
        "why",
        "report",
        "ledger",
        "runs",
        "checkpoint check",
        "checkpoint list",
        "checkpoint prune",
    ],
)
def test_a_verb_that_needs_no_task_works_without_it(
    verb: str, moved: str, surefoot: Command
) -> None:
    answer = surefoot(*verb.split(), "run")
    assert answer.code == 0, answer.err
    if verb == "checkpoint prune":
        assert surefoot("checkpoint", "prune", "run", "--keep", "2").code == 0
        assert manifest.steps(Path("run"))[-2:] == [6, 8]


@pytest.mark.quick("resume", "evaluate", "predict", "resume --fork other --steps 12")
@pytest.mark.parametrize(
    "verb",
    [
        "resume",
        "evaluate",
        "predict",
        "checkpoint export --to w.safetensors",
        "resume --fork other --steps 12",
        'profile --steps 2 --with ""',
        "roofline --steps 1 --quiet",
        "whatif noise --draws 16 --size 1 --quiet",
    ],
)
def test_one_option_says_where_the_task_is_now(verb: str, moved: str, surefoot: Command) -> None:
    name, *words = verb.split(" --")
    options = [part for each in words for part in shlex.split(f"--{each}")]
    refused = surefoot(*name.split(), "run", *options)
    assert refused.code == 2
    assert "old/mine.py" in refused.err
    assert "--task FILE:NAME" in refused.err
    answer = surefoot(*name.split(), "run", *options, "--task", moved)
    assert answer.code == 0, answer.err


def test_load_takes_the_name_of_a_task_that_was_moved(moved: str, surefoot: Command) -> None:
    with pytest.raises(TaskError, match=r"old/mine\.py"):
        library.load("run")
    model = library.load("run", task=moved)
    assert model.state_dict()["0.weight"].shape == (6, 4)
