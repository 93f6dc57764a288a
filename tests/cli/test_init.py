"""`surefoot init`: two files that run as they are, and nothing overwritten."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.cli.reference import ROOT
from tests.train.small import fill, mounted


def test_the_next_command_that_init_prints_works_as_it_is(
    surefoot: Command, tmp_path: Path
) -> None:
    answer = surefoot("init", "a b")
    assert (answer.code, answer.err) == (0, "")
    words = shlex.split(answer.out.splitlines()[-1].removeprefix("next: "))
    assert words == ["surefoot", "train", "a b/my_spec.toml"]
    row = surefoot(*words[1:], "--steps", "150", "--quiet", "--json").row
    assert (row["outcome"], row["score"], row["step"]) == ("finished", "accuracy", 150)
    assert row["value"] > 0.8
    assert surefoot("spec", "check", "a b/my_spec.toml").code == 0


def test_init_writes_here_by_default_and_tells_machines_what_it_wrote(
    surefoot: Command, tmp_path: Path
) -> None:
    assert surefoot("init", "--json").row == {
        "files": ["my_task.py", "my_spec.toml"],
        "next": "surefoot train my_spec.toml",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my_spec.toml", "my_task.py"]


@pytest.mark.parametrize("name", ["my_task.py", "my_spec.toml"])
def test_init_overwrites_nothing(name: str, surefoot: Command, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    answer = surefoot("init")
    assert answer.code == 2
    assert answer.err.startswith(f"error: {name} already exists")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_init_into_what_is_no_folder_is_bad_input(surefoot: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/inside"):
        answer = surefoot("init", folder)
        assert answer.code == 2
        assert "hint: give another folder" in answer.err


def test_init_on_a_full_disk_leaves_nothing_behind(surefoot: Command, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=64k") as disk:
        ballast = fill(disk, leaving=0)
        answer = surefoot("init", disk)
        assert answer.code == 2
        assert "No space left on device" in answer.err
        assert list(disk.iterdir()) == [ballast]
        ballast.unlink()
        assert surefoot("init", disk).code == 0


def test_the_starter_needs_core_dependencies_alone_and_passes_the_linter(
    surefoot: Command, tmp_path: Path
) -> None:
    surefoot("init")
    text = (tmp_path / "my_task.py").read_text()
    imported = {
        line.split()[1].split(".")[0]
        for line in text.splitlines()
        if line.startswith(("import ", "from "))
    }
    assert imported == {"__future__", "numpy", "torch", "surefoot"}
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--config",
        str(ROOT / "pyproject.toml"),
        "my_task.py",
    ]
    ruff = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ruff.returncode == 0, ruff.stdout + ruff.stderr
