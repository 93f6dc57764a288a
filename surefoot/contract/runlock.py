"""One writer for a run folder, and a generation that rises with every attempt.

The lock is the kernel's (flock on `run.lock`): it goes with the process, however that dies. Where there is no flock (Windows),
the file is created exclusively and must be removed by hand after a crash.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from surefoot.core.errors import RunFolderError, StorageError

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Linux
    fcntl = None  # type: ignore[assignment]

FILE = "run.lock"


class RunLock:
    """Held by the one process that may write a run folder; `generation` counts the attempts from 1."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunFolderError(f"{folder} cannot be written: {error.strerror}", hint="give another --run folder") from error
        self._lock(folder)
        self.generation = self._previous() + 1
        self._write()

    def _lock(self, folder: Path) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = _read(self._descriptor).get("process", "unknown")
            os.close(self._descriptor)
            raise RunFolderError(
                f"{folder} is being written by process {owner}", hint="wait for it, or give another --run folder"
            ) from None

    def _previous(self) -> int:
        generation = _read(self._descriptor).get("generation", 0)
        return generation if isinstance(generation, int) else 0

    def _write(self) -> None:
        text = json.dumps({"generation": self.generation, "process": os.getpid()})
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode(), 0)
            os.fsync(self._descriptor)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}", hint="free some space") from error

    def still_ours(self) -> bool:
        """Whether no later attempt took the folder; asked again before every commit."""
        try:
            return int(json.loads(self._path.read_text())["generation"]) == self.generation
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def _read(descriptor: int) -> dict[str, object]:
    try:
        row = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}
