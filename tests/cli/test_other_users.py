"""Tests of runs that several users share.

Modes follow the umask, and what one of them may not read is a row or an error, never a fault.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.core.place import child_environment
from tests.train.small import FEW, write_task

ROOT = Path(__file__).resolve().parents[2]
IS_ROOT = hasattr(os, "getuid") and os.getuid() == 0
NOBODY = 65534


# the verb once on a run that this user may read, which loads the code of ours that the other user
# may not reach; then as that user
AS_ANOTHER_USER = """
import contextlib, io, os, sys
from surefoot.cli.main import main
def call(words):
    sys.argv = ["surefoot", *words]
    try:
        main()
    except SystemExit as left:
        return left.code
verb, sound, user = sys.argv[1].split(), sys.argv[2], int(sys.argv[3])
words = sys.argv[4:]
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    call([*verb, sound, *([] if "--out" in words else words[1:])])
os.setgroups([])
os.setgid(user)
os.setuid(user)
sys.exit(call([*verb, *words]))
"""


def surefoot(*words: str | Path, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return python("-m", "surefoot", *words, umask=umask)


def as_another_user(verb: str, sound: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command as a user who owns nothing."""
    return python("-c", AS_ANOTHER_USER, verb, sound, NOBODY, *words)


def python(*words: str | Path | int, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    environment = {
        **child_environment(threads=1),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        umask=umask,
        cwd="/",
        env=environment,
        timeout=300,
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A folder that every user can reach; those of pytest are their owner's alone."""
    with tempfile.TemporaryDirectory(prefix="surefoot-shared-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def run(shared: Path) -> Path:
    """A run of this user, with commits, a report and outputs, under the usual umask."""
    return make_run(shared, 0o022)


def make_run(folder: Path, umask: int) -> Path:
    folder.mkdir(exist_ok=True)
    run = folder / "runs" / "mine"
    assert (
        surefoot("train", write_task(folder), *FEW, "--run", run, "--quiet", umask=umask).returncode
        == 0
    )
    for verb in ("report", "predict"):
        done = surefoot(verb, run, umask=umask)
        assert done.returncode == 0, done.stderr
    done = surefoot("profile", run, "--steps", "1", umask=umask)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_the_modes_of_all_that_a_run_writes_follow_the_umask(umask: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "made", umask)
    assert (
        surefoot(
            "checkpoint", "export", run, "--to", run / "weights.safetensors", umask=umask
        ).returncode
        == 0
    )
    found = {
        path.relative_to(run).as_posix(): path.stat().st_mode for path in [run, *run.rglob("*")]
    }
    assert {
        "ledger.bin",
        "run.lock",
        "events.jsonl",
        "checkpoints",
        "profile/facts.json",
        "predictions-test.safetensors",
    } <= found.keys()
    wrong = {
        name: oct(stat.S_IMODE(mode))
        for name, mode in found.items()
        if stat.S_IMODE(mode) != (0o777 if stat.S_ISDIR(mode) else 0o666) & ~umask
    }
    assert not wrong


@pytest.mark.quick("ledger", "evaluate")
@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
@pytest.mark.parametrize(
    "verb",
    [
        "show",
        "why",
        "ledger",
        "evaluate",
        "compare",
        "report",
        "checkpoint check",
        "checkpoint list",
    ],
)
def test_another_user_reads_a_run(verb: str, run: Path, shared: Path) -> None:
    (shared / "open").mkdir(exist_ok=True)
    (shared / "open").chmod(0o777)
    more = {"compare": [run], "report": ["--out", shared / "open" / "report.html"]}.get(verb, [])
    done = as_another_user(verb, run, run, *more)
    (shared / "open" / "report.html").unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr


CLOSED = [
    "events.jsonl",
    "checkpoints",
    ".",
    "spec.toml",
    "ledger.bin",
    "checkpoints/step-000000000008/manifest.json",
]


@pytest.mark.quick("ledger-ledger.bin")
@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("verb", ["show", "report", "evaluate", "ledger", "checkpoint check"])
@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_what_a_user_may_not_read_is_an_error_with_2_and_no_fault(
    verb: str, closed: str, run: Path, shared: Path
) -> None:
    mine = shared / "closed" / "run"
    shutil.rmtree(mine.parent, ignore_errors=True)
    shutil.copytree(run, mine)
    (mine / closed).chmod(0)
    done = as_another_user(verb, run, mine)
    assert "Traceback" not in done.stderr
    assert done.returncode in (
        (0, 1, 2) if verb == "checkpoint check" or done.returncode == 0 else (2,)
    ), done.stderr
    if done.returncode == 2:
        assert str(mine) in done.stderr
        assert "hint: " in done.stderr or "is not readable" in done.stderr


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_a_run_that_cannot_be_read_is_one_row_of_the_list(
    closed: str, run: Path, tmp_path: Path, shared: Path
) -> None:
    place = shared / "list"
    shutil.rmtree(place, ignore_errors=True)
    for name in ("a", "b", "c"):
        shutil.copytree(run, place / name)
    (place / "b" / closed).chmod(0)
    done = as_another_user("runs", run, place, "--json")
    assert done.returncode == 0, done.stderr
    states = {Path(row["run"]).name: row["state"] for row in json.loads(done.stdout)["runs"]}
    is_hidden = closed in ("events.jsonl", ".")
    assert states == {
        "a": "finished",
        "b": "unreadable" if is_hidden else "finished",
        "c": "finished",
    }
