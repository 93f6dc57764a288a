"""A run folder that was moved or copied is reported under the name that was given."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Command
from tests.train.small import FEW, write_task


def test_a_finished_run_that_was_moved_is_reported_in_its_new_folder(
    tmp_path: Path, surefoot: Command
) -> None:
    task, moved = write_task(tmp_path), tmp_path / "moved"
    assert surefoot("train", task, *FEW, "--quiet", "--run", tmp_path / "old").code == 0
    (tmp_path / "old").rename(moved)
    for words in (("resume", moved), ("train", task, *FEW, "--run", moved)):
        answer = surefoot(*words, "--json")
        assert (answer.code, answer.row["folder"]) == (0, str(moved))
