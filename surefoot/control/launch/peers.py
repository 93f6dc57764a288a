"""Handles for ranks that a different launcher started, such as torchrun.

They have the interface with which `local` ends its own ranks. Each rank is asked to end itself, and
is killed if it does not.
"""

from __future__ import annotations

import contextlib
import os
import signal

from surefoot.control.launch.forks import wait_for
from surefoot.core import flight

# seconds for a rank to end itself: a stopped process, or one that never releases the GIL, does not
ENDS_S = 5.0


class Peer:
    """Handle for a rank that is not a child of this process; Linux only.

    It has those methods of `subprocess.Popen` that the supervisor uses.
    """

    stderr = None

    def __init__(self, pid: int, record: int) -> None:
        """Open process `pid`, whose flight record has the file descriptor `record`.

        Raises:
            ProcessLookupError: if the process has ended.
        """
        self.pid, self._record = pid, record
        self._end = os.pidfd_open(pid)  # readable once the process has ended

    def poll(self) -> int | None:
        """Return 0 if the process has ended, whatever its exit code; None if it is running."""
        return self._wait_for_exit(0)

    def wait(self) -> int:
        """Wait until the process has ended; kill it after `ENDS_S` seconds. Return 0."""
        if self._wait_for_exit(int(1000 * ENDS_S)) is None:
            self.send_signal(signal.SIGKILL)
        code = self._wait_for_exit(None)
        assert code is not None
        return code

    def kill(self) -> None:
        """Ask the process to end itself, with the exit code of a lost rank.

        Unlike `subprocess.Popen.kill`, this sends no SIGKILL.
        """
        flight.dismiss(self._record)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end, number)

    def _wait_for_exit(self, within_ms: int | None) -> int | None:
        return 0 if wait_for((self._end,), within_ms) else None
