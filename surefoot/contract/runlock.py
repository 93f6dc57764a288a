"""A lock that lets one process write a run folder, and a generation that counts attempts.

The lock is a kernel lock (flock on `run.lock`), which is released when the process ends for any
reason. On a system without flock (Windows) nothing is locked, and a note at the start of a run says
so. There only the generation shows that a later attempt has taken over the folder.
"""

from __future__ import annotations

import contextlib
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
# one for each boot of a kernel, the same in all its containers
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_TIME_S = 1e11  # largest time that a file may claim
NAMED_WITHIN_S, LOOK_S = 2.0, 0.01  # an owner writes its process id right after it gets the lock


class RunLock:
    """Lock of the process that writes a run folder.

    `generation` is the number of the process's attempt, from 1.
    """

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        """Lock `folder`, and set `generation`.

        It is one more than the generation in the lock file, or than `after` if that is larger.
        Raises RunFolderError if another process holds the lock, whose id is in the message, or if
        the file cannot be written.
        """
        # absolute, so that it does not depend on the working folder
        self._path = folder.absolute() / FILE
        self._descriptor = -1
        self._process = os.getpid()
        close_in_children(self)
        try:
            self._open(folder)
            self.generation = max(self._read_generation(), after) + 1
            self._write()
        except OSError as error:
            self.release()
            raise RunFolderError(
                f"{error.filename or folder} cannot be written: {error.strerror}",
                hint=hint_unwritten(error, "give another run folder"),
            ) from error

    @classmethod
    def following(cls, folder: Path, generation: int) -> Self:
        """Return an object with which a process can check a lock that another process holds.

        It neither locks nor releases anything. `generation` is that of the lock's owner.
        """
        made = cls.__new__(cls)
        made._path, made._descriptor, made._process, made.generation = (
            folder.absolute() / FILE,
            -1,
            os.getpid(),
            generation,
        )
        return made

    def _open(self, folder: Path) -> None:
        while True:
            self._descriptor = files.open_descriptor(folder, FILE, os.O_RDWR | os.O_CREAT)
            self._lock(folder)
            with contextlib.suppress(FileNotFoundError):
                # a launcher may have removed the file that was locked
                if os.path.samestat(os.fstat(self._descriptor), self._path.lstat()):
                    return
            self.release()

    def _lock(self, folder: Path) -> None:
        """Lock the file. Raises RunFolderError if another process holds the lock.

        An owner writes its process id soon after it locks the file. Until then the file names no
        process, or one that has ended, so this method waits up to 2 seconds before it raises the
        error.
        """
        until_s = time.monotonic() + NAMED_WITHIN_S
        while not self._is_locked():
            owner = _read(self._descriptor).get("process", "unknown")
            if _is_alive(owner) or time.monotonic() >= until_s:
                self.release()
                is_own = str(owner) == str(os.getpid())
                raise RunFolderError(
                    f"{folder} is being written by process "
                    f"{owner}{', which is this one' if is_own else ''}",
                    hint="close() the run that is open first"
                    if is_own
                    else "wait for it, or give another --run folder",
                )
            time.sleep(LOOK_S)

    def _is_locked(self) -> bool:
        """Try to lock the file, and return whether it is now locked by this process.

        True on a system without flock.
        """
        if fcntl is not None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def _read_generation(self) -> int:
        generation = _read(self._descriptor).get("generation", 0)
        return generation if isinstance(generation, int) else 0

    def _write(self) -> None:
        """Write the owner to the lock file, in place and padded to a fixed size.

        So a full disk cannot lose the previous generation.
        """
        row = {
            "generation": self.generation,
            "process": os.getpid(),
            "host": socket.gethostname()[:64],
            "boot": read_boot_id(),
            "since_s": time.time(),
        }
        text = json.dumps(row).encode().ljust(WIDTH_BYTES)
        was_new = not os.fstat(self._descriptor).st_size
        try:
            written = 0
            # after a partial write the next one raises the reason: a full disk, or a limit
            while written < len(text):
                written += os.pwrite(self._descriptor, text[written:], written)
            os.ftruncate(self._descriptor, len(text))
            os.fsync(self._descriptor)
        except OSError:
            if was_new:
                self._path.unlink(missing_ok=True)
            raise

    def is_still_held(self) -> bool:
        """Return True if it is certain that no later attempt has taken over the folder.

        This is checked before every checkpoint. False if the disk does not respond.
        """
        return self._is_current() is True

    def is_lost(self) -> bool:
        """Return True if certainly a later attempt took over the folder, or the folder is gone.

        False if the disk does not respond.
        """
        return self._is_current() is False

    def describe_loss(self) -> str:
        """Return why this attempt may not write: the folder is gone, or a later attempt has it."""
        folder = self._path.parent
        if not self._path.exists():
            return f"{folder} no longer exists: it was moved or deleted"
        return f"a later attempt now writes {folder} (generation {read_generation(folder)})"

    def _is_current(self) -> bool | None:
        try:
            return (
                int(json.loads(files.read_bytes(self._path.parent, FILE))["generation"])
                == self.generation
            )
        except (
            FileNotFoundError,
            NotADirectoryError,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ):
            return False
        except OSError:
            return None

    def release(self) -> None:
        if self._descriptor >= 0:
            if fcntl is not None and os.getpid() == self._process:
                with contextlib.suppress(OSError):
                    # workers of a loader hold the file too: it stays locked if only this one closes
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def describe_missing_lock() -> tuple[str, ...]:
    """Return a note if the system has no flock, so that two processes could write the same folder.

    The result is empty if the system has flock.
    """
    if fcntl is not None:
        return ()
    return (
        (
            "this system has no flock, so a second process could write into the run "
            "folder: start one process at a time"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class LockOwner:
    """Attempt that last locked a run folder, by `run.lock`, and whether it still holds the lock.

    Unknown values are None.
    """

    is_held: bool | None
    generation: int | None
    process: int | None
    host: str | None
    boot: str | None
    since_s: float | None


def read_boot_id() -> str | None:
    """Return the id of this boot of the kernel; None if the system has none."""
    try:
        return files.read_bytes(BOOT_ID.parent, BOOT_ID.name).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def find_owner(folder: Path) -> LockOwner:
    """Return the process that last locked the run in `folder`, and whether it still holds the lock.

    Call this before reading the records of the run. Otherwise a run that ends in between would look
    as if its process had died.
    """
    is_held = probe(folder)
    descriptor = _open_to_read(folder)
    row = {} if descriptor is None else _read(descriptor)
    if descriptor is not None:
        os.close(descriptor)
    host, boot, since_s = row.get("host"), row.get("boot"), row.get("since_s")
    return LockOwner(
        is_held=is_held,
        generation=_integer_or_none(row.get("generation")),
        process=_integer_or_none(row.get("process")),
        host=host if isinstance(host, str) else None,
        boot=boot if isinstance(boot, str) else None,
        since_s=float(since_s)
        if isinstance(since_s, int | float) and 0 <= since_s < MAX_TIME_S
        else None,
    )


def _integer_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def probe(folder: Path) -> bool | None:
    """Return whether a process of this host holds the run lock in `folder`; None if unknown."""
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
    """Return whether a process of this host is writing the run in `folder`; False if unknown."""
    return probe(folder) is True


@contextlib.contextmanager
def keep_out(folder: Path) -> Iterator[None]:
    """Prevent processes of this host, inside the block, from starting to write a run in `folder`.

    Nothing is written. Raises RunFolderError if a process is already writing the run.
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
            f"{folder} is being written by process {process}",
            hint="end the run first, or wait for its end",
        ) from None


def _open_to_read(folder: Path) -> int | None:
    """Return a descriptor of the lock file without following a link; None if unreadable."""
    try:
        return files.open_descriptor(folder, FILE)
    except OSError:
        return None


def read_generation(folder: Path) -> int:
    """Return the number of the newest attempt of the run in `folder`; 0 if unknown."""
    try:
        generation = json.loads(files.read_bytes(folder, FILE))["generation"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
    return generation if isinstance(generation, int) else 0


def _is_alive(process: object) -> bool:
    """Return whether a process with the id `process` exists on this host."""
    if not isinstance(process, int) or process <= 0:
        return False
    try:
        os.kill(process, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)  # a process of another user
    return True


def _read(descriptor: int) -> dict[str, object]:
    try:
        row = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}
