"""Hang detection for ranks without a surefoot supervisor, such as under torchrun.

A rank that waits for half of `layout.hang_timeout` starts a process that inspects all ranks
(`cli/watch`). Each rank ends when that process reports a hang. This works on one host only: the
process reads the state of a rank from shared files and requests the rank's stack by a signal.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from surefoot.core import flight, place
from surefoot.core.errors import LostRank
from surefoot.core.place import Place
from surefoot.runtime.comm.group import Group

LOOK_S = 0.25
Files = list[tuple[int, int]]  # for each rank: its flight record and its stacks


@contextlib.contextmanager
def watched(group: Group, here: Place, stall_s: float) -> Iterator[str]:
    """Return a context in which hangs of the ranks in `group` are detected.

    It yields the reason if detection is not possible, otherwise an empty string. Every rank must
    call this. A rank counts as hung after `stall_s` seconds in a collective.
    """
    if group.is_alone or here.told is not None or group.flight is None:
        yield ""
        return
    if not hasattr(os, "pidfd_open"):
        yield "the supervisor watches ranks only on Linux"
        return
    mine = {
        "host": here.host,
        "pid": os.getpid(),
        "files": group.flight.files,
        "are": list(map(_identity, group.flight.files)),
    }
    rows = [json.loads(text) for text in group.exchange(json.dumps(mine))]
    with contextlib.ExitStack() as stack:
        files, why = _open_all(rows, stack)
        whys = group.exchange(why)
        if any(whys):
            yield next(filter(None, whys))
            return
        watch = _Watch(group.rank, files, [row["pid"] for row in rows], stall_s)
        stack.callback(watch.close)
        yield ""


def _identity(descriptor: int) -> list[int]:
    found = os.fstat(descriptor)
    return [found.st_dev, found.st_ino]


def _open_all(rows: Sequence[dict[str, Any]], stack: contextlib.ExitStack) -> tuple[Files, str]:
    """Open the files of all ranks in this process; return them, or why they cannot be opened."""
    hosts = {row["host"] for row in rows}
    if len(hosts) > 1:
        return [], (
            f"the ranks are on {len(hosts)} hosts, and the supervisor watches only ranks "
            "of one host"
        )
    found: list[int] = []
    for row in rows:
        for number, known in zip(row["files"], row["are"], strict=True):
            try:
                found.append(os.open(f"/proc/{row['pid']}/fd/{number}", os.O_RDWR | os.O_CLOEXEC))
            except OSError:
                return [], "the ranks cannot see each other's processes"
            stack.callback(os.close, found[-1])
            if _identity(found[-1]) != known:
                return [], "the ranks cannot see each other's processes"
    return list(zip(found[::2], found[1::2], strict=True)), ""


class _Watch:
    """Thread that ends this rank when a hang is reported.

    The rank that first waits for half of `stall_s` also starts the process that detects hangs.
    """

    def __init__(self, rank: int, files: Files, pids: Sequence[int], stall_s: float) -> None:
        self._mine, self._files, self._pids, self._stall_s = files[rank][0], files, pids, stall_s
        self._watcher: subprocess.Popen[bytes] | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._check_ranks, name="surefoot watch", daemon=True
        )
        self._thread.start()

    def _check_ranks(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._end_if_dismissed()
            waits_s = flight.read(self._mine).waits_s
            if (
                self._watcher is None
                and waits_s is not None
                and waits_s >= self._stall_s / 2
                and self._is_chosen()
            ):
                self._watcher = self._start()

    def _end_if_dismissed(self) -> None:
        """End this process if a hang was reported; its main thread hangs, or waits for one."""
        if any(flight.is_dismissed(record) for record, _ in self._files):
            os._exit(LostRank.exit_code)

    def _is_chosen(self) -> bool:
        """Return whether this rank is the first to get the lock for starting the process."""
        try:
            fcntl.flock(self._files[0][0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _start(self) -> subprocess.Popen[bytes]:
        ranks = [
            {"pid": pid, "files": files} for pid, files in zip(self._pids, self._files, strict=True)
        ]
        words = json.dumps({"stall_s": self._stall_s, "parent": os.getpid(), "ranks": ranks})
        # an installed `surefoot` does not import modules from this folder
        safe = [] if os.getcwd() in sys.path else ["-P"]
        return subprocess.Popen(
            [sys.executable, *safe, "-m", "surefoot.cli.watch", words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[each for pair in self._files for each in pair],
            process_group=0,
            env=place.child_environment(threads=1),
        )

    def close(self) -> None:
        """End the thread, and the process that detects hangs if this rank started it."""
        self._is_over.set()
        self._thread.join()
        # a dismissed rank that ends first breaks a collective of this one; the process that detects
        # hangs has then still to record the hang
        self._end_if_dismissed()
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
