"""The supervisor with ranks that are forked from a process that has loaded torch.

A run of them takes half a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from surefoot.cli import options
from surefoot.cli.main import _print_error
from surefoot.control.launch import local
from surefoot.control.launch.forks import ForkServer
from surefoot.control.launch.looking import RankFiles
from surefoot.core import place
from surefoot.core.errors import SurefootError
from surefoot.core.process.signals import make_parent_death_hook

Job = Callable[[int], int]
GONE_S = 10.0  # within which no process may be left


class Forked:
    """What the supervisor uses of subprocess.Popen."""

    def __init__(self, pid: int, stderr: int | None) -> None:
        self.pid, self._code = pid, None
        self.stderr = None if stderr is None else os.fdopen(stderr, "rb", buffering=0)

    def poll(self) -> int | None:
        return self._take(os.WNOHANG)

    def wait(self) -> int | None:
        return self._take(0)

    def _take(self, how: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, how)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Supervised:
    """A supervisor in a process of its own, over so many ranks that each do `job(rank)`.

    Each rank ends with the exit code that `job` gives.

    `prepare` is called first, by the supervisor. What all of them say is in `said`; `pids` holds
    the ranks of the newest attempt, by rank.
    """

    def __init__(
        self,
        job: Job,
        num_ranks: int,
        folder: Path,
        *,
        stall_s: float = 60.0,  # a busy machine is no stall
        run: Path | None = None,
        max_restarts: int = 0,
        numbers: Sequence[int] = (),
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._num_ranks = folder, num_ranks

        def supervise() -> int:
            prepare()
            return _supervise(job, num_ranks, folder, stall_s, run, max_restarts, numbers)

        self.pid = forked(supervise)

    @property
    def said(self) -> str:
        path = self._folder / "said"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def pids(self) -> dict[int, int]:
        """Those of the newest attempt; a rank that has not begun has none."""
        paths = [path for path in self._folder.glob("pid-*") if path.suffix != ".draft"]
        rows = sorted(
            (path.stat().st_mtime_ns, int(path.name.split("-")[1]), int(path.name.split("-")[2]))
            for path in paths
        )
        return {rank: pid for _, rank, pid in rows}

    def wait(self, within_s: float = 240.0) -> int:
        """Its exit code; AssertionError where it does not end."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"the supervisor was still there after {within_s} s\n{self.said}")

    def left(self, within_s: float = GONE_S) -> list[int]:
        """The ranks of any attempt that are still there after so long."""
        until_s = time.monotonic() + within_s
        every = [int(path.name.split("-")[2]) for path in self._folder.glob("pid-*")]
        while (alive := [pid for pid in every if is_alive(pid)]) and time.monotonic() < until_s:
            time.sleep(0.01)
        return alive


def is_alive(pid: int) -> bool:
    """Whether a process does anything still, in any thread.

    One that has ended and that nobody has asked for does not.

    Its main thread may be gone while another one, which writes, still holds the lock of the run.
    """
    try:
        states = [
            path.read_text().rpartition(")")[2].split()[0]
            for path in Path(f"/proc/{pid}/task").glob("*/stat")
        ]
    except (FileNotFoundError, ProcessLookupError):
        return is_alive(pid) if Path(f"/proc/{pid}").exists() else False
    return any(state not in "ZX" for state in states)


def _supervise(
    job: Job,
    num_ranks: int,
    folder: Path,
    stall_s: float,
    run: Path | None,
    max_restarts: int,
    numbers: Sequence[int],
) -> int:
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    speak(said, said)

    def start(
        server: ForkServer,
        rank: int,
        ranks: int,
        meeting: socket.socket,
        told: RankFiles,
        *,
        local_rank: int,
    ) -> local.RankProcess:
        return local.RankProcess(rank, _fork(job, rank, ranks, meeting, told, folder, local_rank))  # type: ignore[arg-type]

    local._start = start
    return local.launch(
        [],
        num_ranks,
        lambda text: print(text, flush=True),
        options.find_judge(stall_s),
        run=run,
        max_restarts=max_restarts,
        numbers=numbers,
    )


def _fork(
    job: Job,
    rank: int,
    num_ranks: int,
    meeting: socket.socket,
    told: RankFiles,
    folder: Path,
    local_rank: int,
) -> Forked:
    reads, writes = os.pipe() if rank else (None, 2)
    parent = os.getpid()
    variables = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": local_rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": meeting.getsockname()[1],
        place.FLIGHT: told.flight,
        place.STACKS: told.stacks,
    } | ({} if rank else {place.LISTENS: meeting.fileno()})

    def begin() -> int:
        for name in local.HEARD:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.setpgid(0, 0)
        make_parent_death_hook(parent)()
        speak(os.open(os.devnull, os.O_WRONLY) if rank else 1, writes)
        if rank:
            meeting.close()
            os.close(writes)
        (folder / f"pid-{rank}-{os.getpid()}").touch()
        os.environ |= {name: str(value) for name, value in variables.items()}
        return job(rank)

    pid = forked(begin)
    if reads is not None:
        os.close(writes)
    return Forked(pid, reads)


def speak(out: int, error: int) -> None:
    """Print to these from now on, and not to what pytest has put in their place."""
    os.dup2(out, 1)
    os.dup2(error, 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))


def forked(job: Callable[[], int]) -> int:
    """A process that does it, and ends with the code that it gives, or that of what it raises.

    Gives the process's number.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        torch.set_num_threads(1)
        speak(1, 2)
        code = job()
    except SurefootError as error:
        _print_error(error)
        code = error.exit_code
    except BaseException:  # noqa: BLE001 - told, and then the process ends: it must not go on as the tests
        print(traceback.format_exc(), file=sys.stderr, flush=True)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
