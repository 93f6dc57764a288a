"""The writer of `events.jsonl`: append-only, whole lines, in one write each."""

from __future__ import annotations

import os
from pathlib import Path

from surefoot.contract import events
from surefoot.core.errors import StorageError


class Journal:
    """Appends events to a run's file. What the disk refuses raises StorageError; the lines before it stay whole."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / events.FILE
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._end_torn_line()
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}", hint="free some space") from error

    def _end_torn_line(self) -> None:
        """A killed attempt may have left half a line: close it off, so that the next record starts on its own."""
        size = os.fstat(self._descriptor).st_size
        if not size:
            return
        with self._path.open("rb") as file:
            file.seek(max(0, size - (1 << 20)))
            tail = file.read()
        if tail.endswith(b"\n"):
            return
        os.truncate(self._path, size - len(tail) + tail.rfind(b"\n") + 1)

    def write(self, event: events.Event) -> None:
        line = event.as_line().encode()
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}", hint="free some space") from error

    def close(self) -> None:
        """Sync and close; an error is one of closing, the lines are already with the system."""
        if self._descriptor < 0:
            return
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1
