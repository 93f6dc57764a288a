"""Start of rank processes, by a fork server if possible.

The fork server is a process that imports every module once and then forks the ranks, which
therefore start at once. It runs the same command as the ranks, with a socket in the environment
variable `place.FORKS`, over which the supervisor requests ranks. If the supervisor ends, the server
is killed; if the server ends, the ranks are killed. The server keeps the exit status of a rank
until the supervisor reads it, so that the process id of an ended rank is not reused.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from surefoot.core import place
from surefoot.core.process.signals import make_parent_death_hook, process_control

# exit status of a rank whose fork server has died: it was killed with it
LOST = -int(signal.SIGKILL)
NAME = 15  # PR_SET_NAME of prctl(2)
MAX_BYTES = 1 << 16
# seconds to fork a rank or to report its exit status; a server that takes longer is killed
ANSWER_S = 20.0


class ForkedRank:
    """Forked rank process, with those methods of `subprocess.Popen` that the supervisor uses."""

    def __init__(
        self, pid: int, server: int, ask: Callable[[int], int], stderr: IO[bytes] | None
    ) -> None:
        self.pid, self.stderr = pid, stderr
        self.returncode: int | None = None
        self._ask = ask
        # each is readable once its process has ended
        self._end, self._end_of_server = os.pidfd_open(pid), os.pidfd_open(server)

    def poll(self) -> int | None:
        return self._wait_for_exit(0)

    def wait(self) -> int:
        code = self._wait_for_exit(None)
        assert code is not None
        return code

    def _wait_for_exit(self, within_ms: int | None) -> int | None:
        if self.returncode is None:
            ready = wait_for((self._end, self._end_of_server), within_ms)
            is_lost = self._end_of_server in ready  # the exit code of the rank is unknown
            if is_lost and self._end not in ready:
                self.kill()  # a rank that was stopped before it could ask to die with the server
                ready = wait_for((self._end,), within_ms)
            if self._end in ready:
                self.returncode = LOST if is_lost else self._ask(self.pid)
                os.close(self._end)
                os.close(self._end_of_server)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._end, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def wait_for(descriptors: Sequence[int], within_ms: int | None) -> set[int]:
    """Return the pidfds whose process has ended, after waiting for the first one to end.

    The wait takes at most `within_ms` milliseconds; None sets no limit.
    """
    waiting = select.poll()
    for each in descriptors:
        waiting.register(each, select.POLLIN)
    return {descriptor for descriptor, _ in waiting.poll(within_ms)}


class ForkServer:
    """Starter of rank processes that run `surefoot WORDS`.

    It forks the ranks from a server process if the system allows that; otherwise it starts a new
    Python process for each rank.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: int | None = None
        self._can_fork = hasattr(os, "pidfd_open") and sys.platform.startswith("linux")

    def start(
        self,
        variables: Mapping[str, str],
        passed: Mapping[str, int],
        *,
        speaks: bool,
        threads: int | None,
    ) -> Any:
        """Start a rank.

        Args:
            variables: environment variables of this rank.
            passed: file descriptors that the rank inherits, each by the environment variable that
                tells the rank its number.
            speaks: True if the rank writes to this terminal; otherwise its standard error is a
                pipe.
            threads: number of compute threads of the rank, unless the environment sets it.

        Returns:
            A `ForkedRank`, or a `subprocess.Popen` if forking is not possible.
        """
        if self._can_fork and (
            self._process is None or self._threads != threads or self._process.poll() is not None
        ):
            self._begin(threads)
        if self._can_fork:
            with contextlib.suppress(OSError, ValueError):
                return self._fork(variables, passed, speaks)
            self.close()
        return self._spawn(variables, passed, speaks, threads)

    def close(self) -> None:
        """Kill the server process, and with it every rank that is still running."""
        if self._process is not None:
            self._link.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _command(self) -> list[str]:
        # an installed `surefoot` does not search the working folder for modules, `python -m` does
        safe = [] if os.getcwd() in sys.path else ["-P"]
        return [sys.executable, *safe, "-m", "surefoot", *self._words]

    def _begin(self, threads: int | None) -> None:
        """Start the server process, and wait until it reports whether it can fork."""
        self.close()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=place.child_environment(threads=threads) | {place.FORKS: str(theirs.fileno())},
                preexec_fn=make_parent_death_hook(os.getpid()),
            )
        self._threads = threads
        try:
            self._can_fork = bool(self._read_answer()["fit"])
            self._link.settimeout(ANSWER_S)
        except (OSError, ValueError):
            self._can_fork = False
        if not self._can_fork:
            self.close()

    def _read_answer(self) -> dict[str, Any]:
        """Read one reply of the server process.

        Raises:
            ValueError: if the server process has ended without a reply.
        """
        row: dict[str, Any] = json.loads(self._link.recv(MAX_BYTES))
        return row

    def _fork(
        self, variables: Mapping[str, str], passed: Mapping[str, int], speaks: bool
    ) -> ForkedRank:
        request = {"variables": dict(variables), "passed": list(passed), "speaks": speaks}
        with contextlib.ExitStack() as stack:
            stderr, given = None, list(passed.values())
            if not speaks:
                reads, writes = os.pipe()
                stack.callback(os.close, writes)
                stderr, given = os.fdopen(reads, "rb", buffering=0), [*given, writes]
            socket.send_fds(self._link, [json.dumps(request).encode()], given)
            assert self._process is not None
            return ForkedRank(
                int(self._read_answer()["pid"]), self._process.pid, self._status, stderr
            )

    def _status(self, pid: int) -> int:
        try:
            self._link.send(json.dumps({"wait": pid}).encode())
            return int(self._read_answer()["status"])
        except (OSError, ValueError):
            self.close()  # ends all ranks too: a late answer would belong to another request
            return LOST

    def _spawn(
        self,
        variables: Mapping[str, str],
        passed: Mapping[str, int],
        speaks: bool,
        threads: int | None,
    ) -> subprocess.Popen[bytes]:
        """Start a rank as a new Python process, which imports everything itself."""
        return subprocess.Popen(
            self._command(),
            stdin=subprocess.DEVNULL,
            stdout=None if speaks else subprocess.DEVNULL,
            stderr=None if speaks else subprocess.PIPE,
            pass_fds=list(passed.values()),
            process_group=0,
            env=place.child_environment(threads=threads)
            | dict(variables)
            | {name: str(number) for name, number in passed.items()},
            preexec_fn=make_parent_death_hook(os.getpid()),
        )


def name_process(name: str) -> None:
    """Set the name of this process in `ps` and `top`; the kernel truncates it to 15 characters."""
    if (control := process_control()) is not None:
        control(NAME, name.encode(), 0, 0, 0)
