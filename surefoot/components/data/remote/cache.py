"""A folder of shards, bounded in bytes, that several processes share: the shard used longest ago goes first, none goes that is in use.

Everything is held by locks of files (flock), which end with the process that has them, however it ends: an open shard has a shared
lock, a draft that is being written an exclusive one, and room is made under the lock of the whole cache. A draft is given all its bytes
before the first is fetched, so that a full disk is told first; it gets its name when it is whole, checked and synced. A draft whose
lock nobody has is what a killed process left, and goes.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from surefoot.core.errors import DataError, hint_unwritten
from surefoot.core.units import format_bytes

DRAFT = ".draft-"
LOCK = ".lock"
ROOM_WAIT_S = 20.0  # for other processes to close a shard
Fill = Callable[[BinaryIO], None]  # writes all bytes of a shard, and raises where they are not the right ones


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One at a time, of all threads and processes: the others wait."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Cache:
    """Shards below `folder`, `most_bytes` of them at most. Raises DataError for a folder that cannot be written."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        with _told(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / LOCK):
                self._sweep()

    def open(self, path: Path, size: int, fill: Fill, *, wait_s: float = ROOM_WAIT_S) -> int:
        """A descriptor of the shard, which is in use until it is closed; fetched by `fill` first where it is not there.

        Raises DataError where there is no room for it, or the disk is full, and what `fill` raises.
        """
        if size > self.most_bytes:
            raise DataError(
                f"{path.name} has {format_bytes(size)}, and the cache holds {format_bytes(self.most_bytes)}",
                hint="give a larger cache_bytes: several shards at least",
            )
        with _told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                descriptor = self._take(path, size)
                if descriptor is not None:
                    return descriptor
                self._make(path, size, fill, wait_s)

    def discard(self, path: Path) -> None:
        """Remove a shard; who has it open reads on."""
        with suppress(FileNotFoundError), _told(path):
            path.unlink()

    def _take(self, path: Path, size: int) -> int | None:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        found = os.fstat(descriptor)
        if found.st_nlink and found.st_size == size:
            with suppress(OSError):  # another user's file: it is read, and stays as old as it is
                os.utime(descriptor)
            return descriptor
        os.close(descriptor)
        if found.st_nlink:  # cut, or of another version of the data
            self.discard(path)
        return None

    def _make(self, path: Path, size: int, fill: Fill, wait_s: float) -> None:
        draft = path.with_name(f"{DRAFT}{path.name}")
        with os.fdopen(os.open(draft, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # whoever fetches it already is waited for
            if not _is_named(file, draft):
                return
            try:
                if path.exists():
                    draft.unlink()
                    return
                file.truncate(0)
                self._reserve(file, draft, size, wait_s)
                fill(file)
                file.flush()
                os.fsync(file.fileno())
                draft.rename(path)
            except BaseException:
                with suppress(OSError):
                    draft.unlink()
                raise

    def _reserve(self, file: BinaryIO, draft: Path, size: int, wait_s: float) -> None:
        """Room for the draft, by letting old shards go; and its bytes taken on the disk."""
        until_s = time.monotonic() + wait_s
        while True:
            with locked(self.folder / LOCK):
                self._sweep(draft)
                missing = self._evict(size)
                if missing <= 0:
                    if size:
                        os.posix_fallocate(file.fileno(), 0, size)
                    return
            if time.monotonic() >= until_s:
                raise DataError(
                    f"the cache {self.folder} has no room for {path_of(draft)}: of its {format_bytes(self.most_bytes)} too much is in use",
                    hint="give a larger cache_bytes: several shards for each process that reads",
                )
            time.sleep(0.05)

    def _evict(self, size: int) -> int:
        """The bytes that are still too many after all has gone that may."""
        shards: list[tuple[int, int, Path]] = []
        used = size
        for path in self._files():
            with suppress(FileNotFoundError):
                found = path.stat()
                used += found.st_size
                if not path.name.startswith(DRAFT):
                    shards.append((found.st_mtime_ns, found.st_size, path))
        for _, count, path in sorted(shards):
            if used <= self.most_bytes:
                break
            if _remove_unused(path):
                used -= count
        return used - self.most_bytes

    def _sweep(self, own: Path | None = None) -> None:
        for path in self._files():
            if path.name.startswith(DRAFT) and path != own:
                _remove_unused(path)

    def _files(self) -> list[Path]:
        return [
            path for folder in self.folder.iterdir() if folder.is_dir() for path in folder.iterdir() if path.suffix != ".index"
        ]


def path_of(draft: Path) -> str:
    """The name of the shard that a draft becomes."""
    return draft.name.removeprefix(DRAFT)


def _is_named(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_unused(path: Path) -> bool:
    """Whether the file went: nobody had a lock of it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What the system refuses, as DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache cannot keep {path}: {error.strerror or error}", hint=hint_unwritten(error, "give another cache")
        ) from error
