"""One writer for a run folder, and a generation that rises with every attempt.

The lock is the kernel's (flock on `run.lock`): it goes with the process, however that dies. Where there is no flock (Windows),
the file is created exclusively and must be removed by hand after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from surefoot.contract.run_folder import files
from surefoot.core.errors import RunFolderError, hint_unwritten
from surefoot.core.place import close_in_children

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Linux
    fcntl = None  # type: ignore[assignment]

FILE = "run.lock"
WIDTH_BYTES = 256
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # one for each start of a kernel, the same in all its containers
LARGEST_TIME_S = 1e11  # of what a file may claim
NAMED_WITHIN_S, LOOK_S = 2.0, 0.01  # an owner writes its number right after it has the lock


class RunLock:
    """Held by the one process that may write a run folder; `generation` counts the attempts from 1."""

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        """Take the lock of `folder`; the generation rises above the file's and above `after`.

        Raises RunFolderError, naming the owner, when another process holds it, or when the file cannot be written.
        """
        self._path = folder.absolute() / FILE  # it stays the same file when the working folder changes
        self._descriptor = -1
        self._process = os.getpid()
        close_in_children(self)
        try:
            self._open(folder)
            self.generation = max(self._previous(), after) + 1
            self._write()
        except OSError as error:
            self.release()
            raise RunFolderError(
                f"{error.filename or folder} cannot be written: {error.strerror}",
                hint=hint_unwritten(error, "give another run folder"),
            ) from error

    @classmethod
    def following(cls, folder: Path, generation: int) -> Self:
        """The lock that another process holds, for one that works with it: it can tell whether it still stands, and releases nothing."""
        made = cls.__new__(cls)
        made._path, made._descriptor, made._process, made.generation = folder.absolute() / FILE, -1, os.getpid(), generation
        return made

    def _open(self, folder: Path) -> None:
        while True:
            self._descriptor = files.open_descriptor(folder, FILE, os.O_RDWR | os.O_CREAT)
            self._lock(folder)
            with contextlib.suppress(FileNotFoundError):  # a launcher that gave the folder back removed the file we locked
                if os.path.samestat(os.fstat(self._descriptor), self._path.lstat()):
                    return
            self.release()

    def _lock(self, folder: Path) -> None:
        """Raise RunFolderError when another holds it. Until that one wrote its number the file names nobody, or one that is dead."""
        until_s = time.monotonic() + NAMED_WITHIN_S
        while not self._is_locked():
            owner = _read(self._descriptor).get("process", "unknown")
            if _is_alive(owner) or time.monotonic() >= until_s:
                self.release()
                is_own = str(owner) == str(os.getpid())
                raise RunFolderError(
                    f"{folder} is being written by process {owner}{', which is this one' if is_own else ''}",
                    hint="close() the run that is open first" if is_own else "wait for it, or give another --run folder",
                )
            time.sleep(LOOK_S)

    def _is_locked(self) -> bool:
        """Lock the file, unless another has; gives whether it is, or there is no flock that could refuse."""
        if fcntl is not None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def _previous(self) -> int:
        generation = _read(self._descriptor).get("generation", 0)
        return generation if isinstance(generation, int) else 0

    def _write(self) -> None:
        """In place and padded: a full disk cannot lose the generation that was there."""
        row = {
            "generation": self.generation, "process": os.getpid(), "host": socket.gethostname()[:64], "boot": read_boot_id(),
            "since_s": time.time(),
        }  # fmt: skip
        text = json.dumps(row).encode().ljust(WIDTH_BYTES)
        was_new = not os.fstat(self._descriptor).st_size
        try:
            if os.pwrite(self._descriptor, text, 0) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._descriptor, len(text))
            os.fsync(self._descriptor)
        except OSError:
            if was_new:
                self._path.unlink(missing_ok=True)
            raise

    def still_ours(self) -> bool:
        """Whether it is certain that no later attempt took the folder; asked again before every commit."""
        return self._stands() is True

    def is_lost(self) -> bool:
        """Whether it is certain that one did, or that the folder is gone: a disk that does not answer is neither."""
        return self._stands() is False

    def describe_loss(self) -> str:
        """Why this attempt may not write: the folder is gone, or which attempt took it over."""
        folder = self._path.parent
        if not self._path.exists():
            return f"{folder} is gone: it was moved or deleted"
        return f"{folder} was taken over by a later attempt (generation {read_generation(folder)})"

    def _stands(self) -> bool | None:
        try:
            return int(json.loads(files.read_bytes(self._path.parent, FILE))["generation"]) == self.generation
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
            return False
        except OSError:
            return None

    def release(self) -> None:
        if self._descriptor >= 0:
            if fcntl is not None and os.getpid() == self._process:
                with contextlib.suppress(
                    OSError
                ):  # a loader's workers hold the file too: closing ours alone would leave it locked
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The attempt that took a run's lock last, as `run.lock` records it, and whether a process holds it; what is not known is None."""

    is_held: bool | None
    generation: int | None
    process: int | None
    host: str | None
    boot: str | None
    since_s: float | None


def read_boot_id() -> str | None:
    """Return what names this start of this kernel; None where the system has no such name."""
    try:
        return files.read_bytes(BOOT_ID.parent, BOOT_ID.name).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def find_owner(folder: Path) -> Owner:
    """Return who took the lock of the run in `folder` last, and whether it is held. Called before the records are read, so that a run
    that ends in between is not taken for one that died."""
    is_held = probe(folder)
    descriptor = _open_to_read(folder)
    row = {} if descriptor is None else _read(descriptor)
    if descriptor is not None:
        os.close(descriptor)
    host, boot, since_s = row.get("host"), row.get("boot"), row.get("since_s")
    return Owner(
        is_held=is_held, generation=_whole(row.get("generation")), process=_whole(row.get("process")),
        host=host if isinstance(host, str) else None, boot=boot if isinstance(boot, str) else None,
        since_s=float(since_s) if isinstance(since_s, int | float) and 0 <= since_s < LARGEST_TIME_S else None,
    )  # fmt: skip


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def probe(folder: Path) -> bool | None:
    """Whether a process of this host holds the lock of the run in `folder`; None where the kernel cannot be asked."""
    if fcntl is None:
        return None
    if not os.path.lexists(folder / FILE):
        return False
    descriptor = _open_to_read(folder)
    if descriptor is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if isinstance(error, BlockingIOError) else None
    finally:
        os.close(descriptor)
    return False


def is_held(folder: Path) -> bool:
    """Whether a process writes the run in `folder` now; False where that cannot be known."""
    return probe(folder) is True


@contextlib.contextmanager
def keep_out(folder: Path) -> Iterator[None]:
    """No process of this host begins to write the run in `folder` inside the block; nothing is written.

    Raises RunFolderError where one writes it already.
    """
    descriptor = _open_to_read(folder)
    try:
        if descriptor is not None and fcntl is not None:
            _share(descriptor, folder)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _share(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        process = _read(descriptor).get("process", "unknown")
        raise RunFolderError(
            f"{folder} is being written by process {process}", hint="end the run first, or wait for its end"
        ) from None


def _open_to_read(folder: Path) -> int | None:
    """A descriptor of the lock file, never of what a link points at; None where it cannot be opened."""
    try:
        return files.open_descriptor(folder, FILE)
    except OSError:
        return None


def read_generation(folder: Path) -> int:
    """The newest attempt at the run in `folder`, 0 where that is not known."""
    try:
        generation = json.loads(files.read_bytes(folder, FILE))["generation"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    return generation if isinstance(generation, int) else 0


def _is_alive(process: object) -> bool:
    """Whether a process of this machine has that number."""
    if not isinstance(process, int) or process <= 0:
        return False
    try:
        os.kill(process, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)  # another user's
    return True


def _read(descriptor: int) -> dict[str, object]:
    try:
        row = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}
