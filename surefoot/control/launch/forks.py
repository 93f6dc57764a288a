"""A process that loads once what every rank needs, and forks the ranks: a run begins, and begins anew, in the time of its own work.

It is the same command with a socket (`place.FORKS`), over which it is asked for ranks; it dies with the supervisor, and the ranks with
it. What a rank was ended by it keeps until it is asked, so that no other process can have got the number of one that is over.
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
from surefoot.core.signals import dying_with, process_control

LOST = -int(signal.SIGKILL)  # how a rank ended whose server is gone: it was killed with it
NAME = 15  # PR_SET_NAME of prctl(2)
MOST_BYTES = 1 << 16
ANSWER_S = 20.0  # to fork, or to tell how a rank ended: one that takes longer is stopped, and is ended


class Forked:
    """A rank, with what a `subprocess.Popen` has of it."""

    def __init__(self, pid: int, ask: Callable[[int], int], stderr: IO[bytes] | None) -> None:
        self.pid, self.stderr = pid, stderr
        self.returncode: int | None = None
        self._ask = ask
        self._end = os.pidfd_open(pid)  # readable once it has ended

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self) -> int:
        code = self._ended(None)
        assert code is not None
        return code

    def _ended(self, within_ms: int | None) -> int | None:
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._end, select.POLLIN)
            if waiting.poll(within_ms):
                self.returncode = self._ask(self.pid)
                os.close(self._end)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._end, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Begins the ranks of `surefoot WORDS`: by forking where the system can and its process is fit for it, else each by itself."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: int | None = None
        self._can_fork = hasattr(os, "pidfd_open") and sys.platform.startswith("linux")

    def start(self, variables: Mapping[str, str], passed: Mapping[str, int], *, speaks: bool, threads: int | None) -> Any:
        """A rank with these variables of its own; `passed` are descriptors by the variable that tells their number.

        Where it `speaks` it has this terminal, else its standard error is to be read from it. `threads`: what it computes with, unless
        the environment says so.
        """
        if self._can_fork and (self._process is None or self._threads != threads or self._process.poll() is not None):
            self._begin(threads)
        if self._can_fork:
            with contextlib.suppress(OSError, ValueError):
                return self._fork(variables, passed, speaks)
            self.close()
        return self._spawn(variables, passed, speaks, threads)

    def close(self) -> None:
        """End the server, and with it every rank that is left."""
        if self._process is not None:
            self._link.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _command(self) -> list[str]:
        # an installed `surefoot` does not look here for modules, `python -m` does
        safe = [] if os.getcwd() in sys.path else ["-P"]
        return [sys.executable, *safe, "-m", "surefoot", *self._words]

    def _begin(self, threads: int | None) -> None:
        """Start the process, and wait until it has loaded everything; it says whether it is fit to be forked."""
        self.close()
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0,
                env=place.child_environment(threads=threads) | {place.FORKS: str(theirs.fileno())}, preexec_fn=dying_with(os.getpid()),
            )  # fmt: skip
        self._threads = threads
        try:
            self._can_fork = bool(self._answer()["fit"])
            self._link.settimeout(ANSWER_S)
        except (OSError, ValueError):
            self._can_fork = False
        if not self._can_fork:
            self.close()

    def _answer(self) -> dict[str, Any]:
        """Raises: ValueError: it is gone, and has said nothing."""
        row: dict[str, Any] = json.loads(self._link.recv(MOST_BYTES))
        return row

    def _fork(self, variables: Mapping[str, str], passed: Mapping[str, int], speaks: bool) -> Forked:
        request = {"variables": dict(variables), "passed": list(passed), "speaks": speaks}
        with contextlib.ExitStack() as stack:
            stderr, given = None, list(passed.values())
            if not speaks:
                reads, writes = os.pipe()
                stack.callback(os.close, writes)
                stderr, given = os.fdopen(reads, "rb", buffering=0), [*given, writes]
            socket.send_fds(self._link, [json.dumps(request).encode()], given)
            return Forked(int(self._answer()["pid"]), self._status, stderr)

    def _status(self, pid: int) -> int:
        try:
            self._link.send(json.dumps({"wait": pid}).encode())
            return int(self._answer()["status"])
        except (OSError, ValueError):
            self.close()  # with all ranks: what it says later would answer another question
            return LOST

    def _spawn(
        self, variables: Mapping[str, str], passed: Mapping[str, int], speaks: bool, threads: int | None
    ) -> subprocess.Popen[bytes]:
        """A process that loads everything itself."""
        return subprocess.Popen(
            self._command(), stdin=subprocess.DEVNULL, stdout=None if speaks else subprocess.DEVNULL,
            stderr=None if speaks else subprocess.PIPE, pass_fds=list(passed.values()), process_group=0,
            env=place.child_environment(threads=threads) | dict(variables) | {name: str(number) for name, number in passed.items()},
            preexec_fn=dying_with(os.getpid()),
        )  # fmt: skip


def name_process(name: str) -> None:
    """What `ps` and `top` call this process; 15 characters of it."""
    if (control := process_control()) is not None:
        control(NAME, name.encode(), 0, 0, 0)
