"""The process that forks ranks gives what a process that is begun by itself would be.

Where it may not fork, each is begun by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from surefoot.contract import events, manifest
from surefoot.control.launch import forks
from surefoot.control.launch.forks import LOST, ForkedRank, ForkServer
from surefoot.core import place
from tests.world.launched import is_alive
from tests.world.test_launch import command, environment

THREADED = (
    "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
)
STOPPED = """
import os, signal, time
fork, parent, stops = os.fork, os.getpid(), os.path.join(os.path.dirname(__file__), "stops")
# as a SIGSTOP that reaches a busy machine's rank late: the kernel wakes what was stopped before its
# parent ended
def stopped():
    if not os.path.exists(stops):
        return fork()
    pid = fork()
    while pid == 0 and os.getppid() == parent:
        time.sleep(0.01)
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return pid
os.fork = stopped
"""
WORDS = ("spec", "check", "nothing-of-this-name")


@contextlib.contextmanager
def opened() -> Iterator[ForkServer]:
    with contextlib.closing(ForkServer(WORDS)) as server:
        yield server


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of modules whose file `stops` has ranks stopped as soon as they are forked."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(STOPPED)
    return folder


@pytest.fixture(scope="module")
def shared(site: Path) -> Iterator[ForkServer]:
    with opened() as server:
        yield server


@pytest.fixture
def server(shared: ForkServer, site: Path, monkeypatch: pytest.MonkeyPatch) -> ForkServer:
    """The same one for several tests, as it loads torch; one that is gone begins again."""
    monkeypatch.setenv("PYTHONPATH", str(site))
    return shared


def begin(
    server: ForkServer, rank: int = 1
) -> tuple[ForkedRank | subprocess.Popen[bytes], socket.socket]:
    """A rank, and the other end of a socket that it has been passed."""
    mine, theirs = socket.socketpair()
    with theirs:
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
        return server.start(
            variables, {"SUREFOOT_LISTENS": theirs.fileno()}, speaks=False, threads=1
        ), mine


def test_a_forked_rank_says_and_ends_as_one_of_its_own(server: ForkServer) -> None:
    rank, mine = begin(server)
    assert isinstance(rank, ForkedRank)
    assert rank.poll() is None
    assert rank.stderr is not None
    said = rank.stderr.read().decode()
    assert rank.wait() == rank.poll() == 2
    rank.send_signal(signal.SIGTERM)  # as to a process that is over: to nobody
    again, other = begin(server)
    again.kill()
    assert again.wait() == LOST
    with mine, other:
        assert mine.recv(1) == other.recv(1) == b""  # nobody else has what they were passed
    assert "nothing-of-this-name" in said
    assert "Traceback" not in said


def test_ranks_begin_again_when_the_process_that_forks_them_was_killed(
    server: ForkServer,
) -> None:
    first, _ = begin(server)
    parent = psutil.Process(first.pid).ppid()
    os.kill(first.pid, signal.SIGSTOP)
    os.kill(parent, signal.SIGKILL)
    assert first.wait() == LOST
    second, _ = begin(server)
    assert isinstance(second, ForkedRank)
    assert second.wait() == 2


@pytest.mark.quick("killed-wait", "closed-poll")
@pytest.mark.parametrize("waits", [True, False], ids=["wait", "poll"])
@pytest.mark.parametrize("ended", ["killed", "closed"])
def test_a_rank_that_is_stopped_before_it_asks_to_die_with_the_process_that_forked_it_ends_with_it(
    ended: str, waits: bool, server: ForkServer, site: Path
) -> None:
    (site / "stops").touch()
    try:
        ranks = [begin(server, rank)[0] for rank in (0, 1)]
    finally:
        (site / "stops").unlink()
    if ended == "killed":
        os.kill(psutil.Process(ranks[0].pid).ppid(), signal.SIGKILL)
    else:
        server.close()
    for rank in ranks:
        while not waits and rank.poll() is None:
            time.sleep(0.01)
        assert rank.wait() == rank.poll() == LOST
        assert not is_alive(rank.pid)


@pytest.mark.slow
def test_one_that_is_stopped_is_ended_and_ranks_begin_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forks, "ANSWER_S", 0.5)
    with opened() as server:
        first, _ = begin(server)
        assert first.wait() == 2
        second, _ = begin(server)
        os.kill(psutil.Process(second.pid).ppid(), signal.SIGSTOP)
        assert second.wait() == LOST
        third, _ = begin(server)
        assert isinstance(third, ForkedRank)
        os.kill(psutil.Process(third.pid).ppid(), signal.SIGSTOP)
        fourth, _ = begin(server)
        assert isinstance(fourth, subprocess.Popen)
        assert fourth.wait() == 2


@pytest.mark.parametrize("left", ["", "abc", "0", "99", "-1", "9" * 20])
def test_a_variable_that_names_no_socket_counts_for_nothing(
    left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(place.FORKS, left)
    assert place.take_forks() is None
    assert place.FORKS not in os.environ


def test_where_a_thread_would_be_lost_each_rank_is_begun_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(THREADED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with opened() as server:
        rank, _ = begin(server)
        assert isinstance(rank, subprocess.Popen)
        assert rank.wait() == 2


def test_ranks_of_a_command_are_forked_and_go_on_when_one_is_killed(tmp_path: Path) -> None:
    stated = (
        "--set",
        'checkpoint.every="5 steps"',
        "--set",
        'observe.every="1 step"',
        "--steps",
        "3000",
    )
    with subprocess.Popen(
        command(tmp_path, *stated, "--quiet"), env=environment(), stderr=subprocess.PIPE, text=True
    ) as over:
        assert over.stderr is not None
        servers = set()
        for attempt in range(2):
            ranks = wait_for_ranks(over.pid, tmp_path / "run", attempt)
            servers |= {each.ppid() for each in ranks}
            assert over.pid not in servers
            assert all(
                "SUREFOOT_FORKS" not in line
                for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
            )
            ranks[attempt].kill()
        wait_for_ranks(over.pid, tmp_path / "run", 2)
        over.kill()  # and all of them end with it
        said = over.stderr.read()
    assert len(servers) == 1
    assert said.count("restart, after step") == 2, said
    until_s = time.monotonic() + 60
    while (
        left := [each for each in (*servers, *(rank.pid for rank in ranks)) if is_alive(each)]
    ) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert left == []


def wait_for_ranks(
    supervisor: int, run: Path, attempt: int, within_s: float = 60.0
) -> list[psutil.Process]:
    """Both ranks, once that attempt has made a commit of its own."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        begun = (
            [each for each in events.read(run) if isinstance(each, events.Started)]
            if (run / events.FILE).is_file()
            else []
        )
        if (
            len(begun) > attempt
            and manifest.steps(run)
            and max(manifest.steps(run)) >= begun[-1].first_step
        ):
            found = [
                each
                for each in psutil.Process(supervisor).children(recursive=True)
                if each.name().startswith("surefoot:")
            ]
            return sorted(found, key=psutil.Process.name)
        time.sleep(0.05)
    raise AssertionError(f"attempt {attempt} made no commit")


LEAVING = """
import atexit, gc, sys, threading, time
gc.disable()
from surefoot.cli.forks import leave
class Held:
    def __init__(self):
        self.own, self.file = self, open(sys.argv[1], "w")
        self.file.write("of a file that is still open, and held by a cycle\\n")
Held()
atexit.register(gc.collect)
atexit.register(lambda: print("at the end", flush=True))
threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread"))).start()
leave(8)
"""


def test_a_rank_that_leaves_at_once_loses_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LEAVING, str(tmp_path / "held")]
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stderr) == (8, "")
    assert done.stdout.split("\n") == ["of a thread", "at the end", ""]
    assert (tmp_path / "held").read_text() == "of a file that is still open, and held by a cycle\n"
