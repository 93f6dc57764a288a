"""The project passes its tests wherever it is cloned to.

In a folder named `surefoot`, as git names it, and at a path with a space.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANGS = "tests/world/test_hang.py::test_what_holds_up_the_others_is_named_by_the_supervisor"
FRAMES = ("tests/core/test_frames.py", f"{HANGS}[disk]", f"{HANGS}[branch]")
COMMANDS = (
    "tests/cli/test_a_run.py::test_a_process_without_output_streams_trains_all_the_same",
    "tests/prove/test_verify.py::test_a_command_that_leaves_nothing_to_compare_is_told_so",
    "tests/world/test_launch.py::test_more_ranks_than_files_may_be_open_for_are_refused_in_words",
)
FOLDERS = {
    "my clones/surefoot": (*FRAMES, *COMMANDS[1:]),
    "surefoot": FRAMES,
    "my surefoot": (*FRAMES, *COMMANDS),
}
PASSED = re.compile(r"^(\d+) passed", re.MULTILINE)


def clone(folder: Path) -> Path:
    """The files of the working tree that git does not ignore, in a new folder.

    With an interpreter there that imports what this one does.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("what belongs to the project is not known without git")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True
    )
    python = folder / ".venv" / "bin" / "python"
    packages = sysconfig.get_path(
        "purelib", vars={"base": str(folder / ".venv"), "platbase": str(folder / ".venv")}
    )
    (Path(packages) / "this.pth").write_text(f"{folder}\n{sysconfig.get_path('purelib')}\n")
    return python


def run_tests(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    python = clone(folder)
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "COV_")) and name != "PYTHONPATH"
    }
    variables |= {
        "DATA": str((ROOT / os.environ.get("DATA", "../shared/data")).resolve()),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--deselect={Path(__file__).relative_to(ROOT)}",
            *words,
        ],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.quick("my clones/surefoot")
@pytest.mark.parametrize("name", FOLDERS)
def test_frames_and_commands_are_right_in_a_clone(name: str, tmp_path: Path) -> None:
    done = run_tests(tmp_path / name, *FOLDERS[name])
    assert done.returncode == 0, done.stdout
    assert PASSED.search(done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["surefoot", "my surefoot"])
def test_all_tests_pass_in_a_clone(name: str, tmp_path: Path) -> None:
    done = run_tests(tmp_path / name)
    assert done.returncode == 0, done.stdout
    assert PASSED.search(done.stdout), done.stdout
