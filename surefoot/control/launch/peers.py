"""Ranks that another launcher started, as `local` ends those of its own: each is told to end itself, and is killed where it does not."""

from __future__ import annotations

import contextlib
import os
import select
import signal

from surefoot.core import flight

ENDS_S = 5.0  # for a rank to end itself: one that is stopped, or that never lets go of Python's lock, does not


class Peer:
    """A process that is no child of this one, with what a `subprocess.Popen` has of it. Linux only."""

    stderr = None

    def __init__(self, pid: int, record: int) -> None:
        """Open process `pid`, whose flight record is the descriptor `record`. Raises ProcessLookupError where it has ended."""
        self.pid, self._record = pid, record
        self._end = os.pidfd_open(pid)  # readable once it has ended

    def poll(self) -> int | None:
        """0 once it has ended, with whatever code."""
        return self._ended(0)

    def wait(self) -> int:
        """Wait until it has ended, and kill it after `ENDS_S`."""
        if self._ended(int(1000 * ENDS_S)) is None:
            self.send_signal(signal.SIGKILL)
        code = self._ended(None)
        assert code is not None
        return code

    def kill(self) -> None:
        """Tell it to end itself, with the exit code of a lost rank."""
        flight.dismiss(self._record)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end, number)

    def _ended(self, within_ms: int | None) -> int | None:
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        return 0 if waiting.poll(within_ms) else None
