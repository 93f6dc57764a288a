"""Tests of runs that several users share.

Modes follow the umask, and what one of them may not read is a row or an error, never a fault.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.forked_commands import call, run_forked
from tests.train.small import FEW, write_task

IS_ROOT = hasattr(os, "getuid") and os.getuid() == 0
NOBODY = 65534


def as_another_user(verb: str, sound: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command as a user who owns nothing.

    This user runs the verb first, on a run that may be read: that loads the code of ours that the
    other user may not reach.
    """

    def become_the_other() -> None:
        first = [*verb.split(), sound, *([] if "--out" in words else words[1:])]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            call(*first)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)

    return run_forked(*verb.split(), *words, folder="/", prepare=become_the_other)


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A folder that every user can reach; those of pytest are their owner's alone."""
    with tempfile.TemporaryDirectory(prefix="surefoot-shared-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def run(shared: Path) -> Path:
    """A run of this user, under the usual umask, with all that the verbs write."""
    return make_run(shared, 0o022)


def make_run(folder: Path, umask: int) -> Path:
    folder.mkdir(exist_ok=True)
    run = folder / "runs" / "mine"
    task = write_task(folder)
    verbs: tuple[tuple[str | Path, ...], ...] = (
        ("train", task, *FEW, "--run", run, "--quiet"),
        ("report", run),
        ("predict", run),
        ("profile", run, "--steps", "1"),
    )

    def make() -> None:
        os.umask(umask)
        for words in verbs:
            assert call(*words) == 0, words

    words = ("checkpoint", "export", run, "--to", run / "weights.safetensors")
    done = run_forked(*words, folder="/", prepare=make)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_the_modes_of_all_that_a_run_writes_follow_the_umask(umask: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "made", umask)
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
