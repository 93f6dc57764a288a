"""Parent of one process of an arm; started by its path in an isolated interpreter.

Uses the standard library only. The launcher has two purposes. The kernel counts the peak memory of
a child from the size of the process that forked it, so that the parent must be small. And an arm
must not continue when the harness is killed.

The launcher leads a process group. It kills the whole group when the harness ends (Linux:
PR_SET_PDEATHSIG) or sends SIGTERM. It writes one JSON line about the process to a descriptor.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
NOT_FOUND = 127  # the exit code of a shell for a command that could not be started


def die_with(parent: int, number: int) -> None:
    """Make the kernel send the signal `number` to this process when `parent` ends (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the request
        raise SystemExit(1)


def end_group(number: int, frame: FrameType | None) -> None:
    """Kill every process of this process group, including this process."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Run COMMAND, and write its exit code, CPU seconds and peak memory to DESCRIPTOR.

    The command line is `launcher.py DESCRIPTOR PARENT COMMAND...`.
    """
    descriptor, parent, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    signal.signal(signal.SIGTERM, end_group)
    die_with(parent, signal.SIGTERM)
    os.set_inheritable(descriptor, False)
    launcher = os.getpid()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with(launcher, signal.SIGKILL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
            raise SystemExit(NOT_FOUND) from None
    _, status, usage = os.wait4(child, 0)
    unit = 1 if sys.platform == "darwin" else 1024
    row = {
        "exit_code": os.waitstatus_to_exitcode(status),
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * unit,
    }
    os.write(descriptor, json.dumps(row).encode())


if __name__ == "__main__":
    main()
