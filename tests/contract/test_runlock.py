"""One writer for a run folder, whoever comes and however it dies.

And a generation that only rises.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from surefoot.components.observe.journal import Journal
from surefoot.contract import runlock
from surefoot.contract.events import FILE as EVENTS
from surefoot.contract.events import Committed
from surefoot.contract.runlock import FILE, RunLock
from surefoot.core.errors import RunFolderError, hint_unwritten
from surefoot.core.place import child_environment

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from pathlib import Path
from surefoot.contract.runlock import RunLock
lock = RunLock(Path(sys.argv[1]))
print(lock.generation, flush=True)
time.sleep(60)
"""
COMPETE = """
import os, sys, time
from pathlib import Path
from surefoot.contract.runlock import RunLock
from surefoot.core.errors import RunFolderError
folder, won = Path(sys.argv[1]), []
print("ready", flush=True)
sys.stdin.readline()
for _ in range(40):
    try:
        with RunLock(folder) as lock:
            (folder / "held").touch(exist_ok=False)  # two at once would fail here
            won.append(lock.generation)
            (folder / "held").unlink()
    except RunFolderError as error:
        assert "is being written by process" in error.message, error
print(*won)
"""


def start(source: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", source, str(folder)],
        env={**child_environment(threads=1), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_lock_that_cannot_be_written_is_told_with_what_mends_that(tmp_path: Path) -> None:
    (tmp_path / "run" / FILE).mkdir(parents=True)
    for folder, why, mend in (
        ("run", "Is a directory", "move the folder of that name away"),
        ("none", "No such file or directory", "create its parent folder"),
    ):
        with pytest.raises(RunFolderError) as refused:
            RunLock(tmp_path / folder)
        assert str(refused.value) == (
            f"{tmp_path / folder / FILE} cannot be written: {why}\n"
            f"hint: {mend}, or give another run folder"
        )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_only_a_disk_without_space_is_to_be_emptied(number: int) -> None:
    assert hint_unwritten(OSError(number, os.strerror(number))) == "free some space"
    assert (
        hint_unwritten(ValueError(f"{os.strerror(number)} (os error {number})"))
        == "free some space"
    )
    for other in (
        errno.EFBIG,
        errno.EISDIR,
        errno.ENOENT,
        errno.EACCES,
        errno.EROFS,
        errno.EIO,
        errno.ENAMETOOLONG,
        None,
    ):
        assert "space" not in hint_unwritten(OSError(other, "no"))


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `tmp_path`."""
    with start(HOLD, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        yield process
        process.kill()


def test_a_second_writer_is_refused_and_told_who_holds_it(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    with pytest.raises(RunFolderError, match=f"is being written by process {holder.pid}"):
        RunLock(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["process"] == holder.pid


@pytest.fixture
def just_locked(tmp_path: Path) -> Iterator[int]:
    """The lock file of `tmp_path`, locked by one that has not written its number yet.

    The file names a process that is dead, or nobody.
    """
    descriptor = os.open(tmp_path / FILE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Whoever waits sees this happen."""
    monkeypatch.setattr(time, "sleep", lambda seconds: happens())


def number_of_a_dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


@pytest.mark.parametrize(
    "names",
    [lambda: None, number_of_a_dead_process, lambda: 2**70],
    ids=["nobody", "a dead one", "none"],
)
def test_an_owner_that_has_just_taken_the_lock_is_waited_for_and_named(
    names: Callable[[], int | None],
    just_locked: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (before := names()) is not None:
        (tmp_path / FILE).write_text(
            json.dumps({"generation": 1, "process": before}).ljust(runlock.WIDTH_BYTES)
        )
    now = json.dumps({"generation": 2, "process": os.getpid()}).ljust(runlock.WIDTH_BYTES)
    meanwhile(monkeypatch, lambda: os.pwrite(just_locked, now.encode(), 0))
    with pytest.raises(RunFolderError, match=f"is being written by process {os.getpid()}\\b"):
        RunLock(tmp_path)


def test_a_lock_that_is_given_back_before_its_owner_is_named_is_taken(
    just_locked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, lambda: fcntl.flock(just_locked, fcntl.LOCK_UN))
    with RunLock(tmp_path) as lock:
        assert lock.is_still_held()


def test_an_owner_that_names_nobody_is_not_waited_for_without_end(
    just_locked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlock, "NAMED_WITHIN_S", 0.02)
    with pytest.raises(RunFolderError, match="is being written by process unknown"):
        RunLock(tmp_path)


def test_a_killed_writer_leaves_no_lock_behind(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with RunLock(tmp_path) as lock:
        assert lock.generation == 2


def test_of_many_writers_one_holds_it_at_a_time_and_every_hold_has_its_own_generation(
    tmp_path: Path,
) -> None:
    processes = [start(COMPETE, tmp_path) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(lambda process: process.communicate("go\n")[0], processes))
    assert [process.returncode for process in processes] == [0, 0, 0]
    generations = [int(number) for text in told for number in text.split()]
    assert sorted(generations) == list(range(1, len(generations) + 1))


def test_the_generation_rises_with_every_attempt(tmp_path: Path) -> None:
    found = []
    for _ in range(12):
        with RunLock(tmp_path) as lock:
            assert lock.is_still_held()
            found.append(lock.generation)
    assert found == list(range(1, 13))


@pytest.mark.parametrize(
    "text",
    ["", "spam", "[]", '{"generation": "x"}', "[" * 4000, '{"generation": 3, "proc', "\0" * 64],
)
def test_a_damaged_lock_file_is_overruled_and_the_log_knows_the_generation(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / FILE).write_text(text)
    with RunLock(tmp_path, after=7) as lock:
        assert lock.generation == 8
        assert json.loads((tmp_path / FILE).read_text())["generation"] == 8


def test_a_longer_earlier_text_leaves_nothing_in_the_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"generation": 4, "process": 1, "more": "x" * 300}))
    with RunLock(tmp_path) as lock:
        assert lock.is_still_held()
        row = json.loads((tmp_path / FILE).read_text())
        assert {**row, "since_s": 0} == {
            "generation": 5,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "boot": runlock.read_boot_id(),
            "since_s": 0,
        }


def test_a_lock_that_was_removed_or_taken_over_is_no_longer_ours(tmp_path: Path) -> None:
    with RunLock(tmp_path) as first:
        (tmp_path / FILE).unlink()
        assert not first.is_still_held()
        with RunLock(tmp_path, after=1) as second:
            assert second.is_still_held()
            assert not first.is_still_held()


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunLock(tmp_path / "missing")
    (tmp_path / FILE).mkdir()
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunLock(tmp_path)


@contextlib.contextmanager
def max_file_bytes(num_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes, as `ulimit -f` does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_of_the_file_size_is_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    with max_file_bytes(100), pytest.raises(RunFolderError) as refused:
        RunLock(tmp_path)
    assert "cannot be written: File too large\nhint: raise the limit" in str(refused.value)
    assert not (tmp_path / FILE).exists()


def test_a_log_at_the_limit_of_the_file_size_names_it_and_keeps_whole_lines(
    tmp_path: Path,
) -> None:
    event = Committed(generation=1, time_s=0.0, step=1, folder="a", num_bytes=1, elapsed_s=1.0)
    log = Journal(tmp_path)
    assert log.write(event) is None
    whole = (tmp_path / EVENTS).read_bytes()
    with max_file_bytes(len(whole) + 10):
        warning = log.write(event)
    assert "cannot be written: File too large" in (warning or "")
    assert (tmp_path / EVENTS).read_bytes() == whole
    assert log.write(event) is None
    log.close()
    assert (tmp_path / EVENTS).read_bytes() == 3 * whole
