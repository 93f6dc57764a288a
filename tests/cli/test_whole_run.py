"""Tests of `surefoot archive`, `remove` and `runs --sizes`.

A run as a whole, never one that is running, never what a link points at.
"""

from __future__ import annotations

import os
import socket
import tarfile
from pathlib import Path

import pytest

from surefoot.cli.operate import whole_run
from surefoot.contract import runlock
from surefoot.contract.runlock import RunLock
from surefoot.core.errors import RunFolderError
from tests.cli import past_runs as past
from tests.cli.conftest import Command
from tests.control.test_health import hold

HERE = {"rank": 0, "world_size": 1, "host": socket.gethostname()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that ended, with a file that two commits link.

    It has links to a file and a folder outside.
    """
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x" * 10_000)
    made = past.write_finished(tmp_path / "runs" / "a 1")
    for step in (1, 2):
        (made / "checkpoints" / f"step-{step:012d}").mkdir(parents=True)
    weights = made / "checkpoints" / f"step-{1:012d}" / "model.safetensors"
    weights.write_bytes(b"w" * 5_000)
    os.link(weights, made / "checkpoints" / f"step-{2:012d}" / "model.safetensors")
    (made / "data").symlink_to(outside)
    (made / "precious").symlink_to(outside / "precious")
    return made


def test_the_sizes_of_runs_are_those_of_their_files(run: Path, surefoot: Command) -> None:
    size = (run / "events.jsonl").stat().st_size + 5_000
    (row,) = surefoot("runs", "--sizes", "--json").row["runs"]
    assert row["num_bytes"] == size == whole_run.count_bytes(run)
    header, line = surefoot("runs", "--sizes").out.splitlines()
    assert header.split()[-1] == "size"
    assert line.rstrip().endswith("KiB")
    assert "num_bytes" not in surefoot("runs", "--json").row["runs"][0]


def modified(run: Path) -> list[tuple[Path, int, int]]:
    """Every file with its size and time of change; reading moves the time of access alone."""
    return [(path, found.st_size, found.st_mtime_ns) for path, found in whole_run.list_files(run)]


def test_an_archive_holds_every_file_and_the_run_stays_as_it_is(
    run: Path, surefoot: Command, tmp_path: Path
) -> None:
    before = modified(run)
    row = surefoot("archive", run, "a.tar", "--json").row
    assert (row["num_files"], row["file"]) == (3, "a.tar")
    with tarfile.open(tmp_path / "a.tar") as tar:
        names = tar.getnames()
        log = tar.extractfile("a 1/events.jsonl")
        assert log is not None
        assert log.read() == (run / "events.jsonl").read_bytes()
    assert names == [f"a 1/{path.relative_to(run)}" for path, _, _ in before]
    assert modified(run) == before
    answer = surefoot("archive", run, "a.tar")
    assert (answer.code, "already exists" in answer.err) == (2, True)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_run_is_removed_with_its_links_and_nothing_that_they_point_at(
    run: Path, surefoot: Command, tmp_path: Path
) -> None:
    answer = surefoot("remove", run, "--yes")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"deleted {run}: 3 files, ")
    assert list((tmp_path / "runs").iterdir()) == []
    assert (tmp_path / "outside" / "precious").stat().st_size == 10_000


def test_without_a_terminal_nothing_is_removed_unless_it_is_said(
    run: Path, surefoot: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as nobody:
        monkeypatch.setattr("sys.stdin", nobody)
        answer = surefoot("remove", run)
    assert (answer.code, "hint: add --yes" in answer.err) == (2, True)
    assert run.is_dir()


@pytest.mark.parametrize("verb", ["archive", "remove"])
def test_a_run_that_is_running_is_left_alone(
    verb: str, run: Path, surefoot: Command, tmp_path: Path
) -> None:
    process = hold(run)
    try:
        answer = surefoot(verb, run, *(["--yes"] if verb == "remove" else ["a.tar"]))
        assert answer.code == 2
        assert f"is being written by process {process.pid}" in answer.err
    finally:
        process.kill()
        process.communicate()
    assert (run.is_dir(), (tmp_path / "a.tar").exists()) == (True, False)


@pytest.mark.parametrize("verb", ["archive", "remove"])
def test_a_run_of_another_host_without_an_end_is_left_alone(
    verb: str, surefoot: Command, tmp_path: Path
) -> None:
    run = past.write(tmp_path / "far", [past.started()])
    answer = surefoot(verb, run, *(["--yes"] if verb == "remove" else ["a.tar"]))
    assert (answer.code, "hint: run this command on that host" in answer.err, run.is_dir()) == (
        2,
        True,
        True,
    )


@pytest.mark.parametrize("verb", ["archive", "remove"])
@pytest.mark.parametrize("what", ["a link", "a folder", "a linked log", "nothing"])
def test_what_is_no_run_is_left_alone(
    verb: str, what: str, run: Path, surefoot: Command, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    if what == "a link":
        given.symlink_to(run)
    elif what != "nothing":
        given.mkdir()
    if what == "a linked log":
        (given / "events.jsonl").symlink_to(run / "events.jsonl")
    answer = surefoot(verb, given, *(["--yes"] if verb == "remove" else ["a.tar"]))
    assert answer.code == 2
    assert (os.path.lexists(given), run.is_dir()) == (what != "nothing", True)


def test_a_killed_or_damaged_run_may_go(surefoot: Command, tmp_path: Path) -> None:
    past.write(tmp_path / "killed", [past.started(place=HERE)])
    past.write(tmp_path / "damaged", [past.started(place=HERE)], torn="{half\n")
    for name in ("killed", "damaged"):
        assert surefoot("remove", name, "--yes").code == 0
    assert list(tmp_path.iterdir()) == []


def test_nobody_begins_to_write_a_run_that_is_being_archived(run: Path) -> None:
    (run / runlock.FILE).write_text("{}")
    with (
        whole_run.lock_run(run),
        pytest.raises(RunFolderError, match="is being written by process"),
    ):
        RunLock(run)
    with RunLock(run) as lock:
        assert lock.generation == 1
