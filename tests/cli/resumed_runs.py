"""A run that ended and one that was left, for tests of what becomes of them."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from surefoot.contract import events, spec_file
from surefoot.contract.events import Started
from surefoot.core.errors import UserCodeError
from surefoot.train.resume.start import Start
from surefoot.train.run import Run
from tests.cli.conftest import Command
from tests.train.small import entries, write_task
from tests.train.test_resume import Left

STEPS, STOP = 14, 7
SPEC = """
[task]
use = "{use}"
[train]
length = "14 steps"
batch = 4
[evaluate]
every = "4 steps"
[checkpoint]
every = "3 steps"
keep = 9
[observe]
tensorboard = false
every = "1 step"
"""


def train(
    folder: str,
    spec: Path,
    *,
    leave_at: int | None = None,
    start: Start | None = None,
    **tables: dict[str, Any],
) -> None:
    """The run of a spec, whole or left at a step as by a kill."""
    made = spec_file.read(str(spec)).spec.replace(**tables)
    with (
        contextlib.suppress(UserCodeError, Left),
        Run(made, folder=folder, quiet=True, start=start) as run,
    ):
        for report in run.steps():
            if run.evaluation_due:
                run.evaluate()
            if report.step == leave_at:
                raise Left
    assert (run.outcome == "finished") == (leave_at is None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec of a task in a file, its run `whole`, and `left`.

    `left` was left after step 7 as by a kill, when step 6 was its newest commit.
    """
    folder = tmp_path_factory.mktemp("trained")
    path = folder / "mine.toml"
    path.write_text(SPEC.format(use=write_task(folder)))
    train(str(folder / "whole"), path)
    train(str(folder / "left"), path, leave_at=STOP)
    return folder


@pytest.fixture
def spec(trained: Path, tmp_path: Path, surefoot: Command) -> Path:
    """All of that in the working folder; gives the spec."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "mine.toml"


def started(folder: str) -> list[Started]:
    return [event for event in events.read(Path(folder)) if isinstance(event, Started)]


def snapshot(folder: str) -> dict[str, bytes]:
    """Every file of a folder but the lock, whose generation only rises."""
    return {
        name: (Path(folder) / name).read_bytes()
        for name in entries(Path(folder))
        if (Path(folder) / name).is_file()
    }
