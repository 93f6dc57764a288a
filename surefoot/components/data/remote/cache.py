"""Cache of shards, limited in bytes and shared by processes.

The least recently used shards are evicted first; a shard in use is never evicted. Processes
coordinate with file locks (flock), which the system releases when a process ends for any reason. An
open shard has a shared lock. A draft, which is a shard that is being downloaded, has an exclusive
lock. Space is freed under a lock on the whole cache.

All bytes of a draft are allocated before its download starts, so that a full disk is reported
first. The draft is renamed when it is complete, verified and synced. A draft without a lock was
left by a killed process, and is removed.
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
Fill = Callable[[BinaryIO], None]  # writes all bytes of a shard, and raises if they are wrong


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Lock the file `path` exclusively during the block.

    If another thread or process has the lock, wait for it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Cache:
    """Cache of shards below `folder`, which have at most `most_bytes` bytes in total.

    Raises DataError for a folder that cannot be written.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        with _as_data_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with file_lock(folder / LOCK):
                self._sweep()

    def open(self, path: Path, size: int, fill: Fill, *, wait_s: float = ROOM_WAIT_S) -> int:
        """Return a file descriptor of a shard; if it is missing, `fill` downloads it first.

        The shard is not evicted until the descriptor is closed. Raises what `fill` raises, and
        DataError if the disk is full, or if the cache has no space for the shard within `wait_s`
        seconds.
        """
        if size > self.most_bytes:
            raise DataError(
                (
                    f"{path.name} has {format_bytes(size)}, but the size of the cache is "
                    f"{format_bytes(self.most_bytes)}"
                ),
                hint="give a larger cache_bytes: several shards at least",
            )
        with _as_data_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                descriptor = self._take(path, size)
                if descriptor is not None:
                    return descriptor
                self._make(path, size, fill, wait_s)

    def discard(self, path: Path) -> None:
        """Remove a shard from the cache. A process that has it open can continue to read it."""
        with suppress(FileNotFoundError), _as_data_error(path):
            path.unlink()

    def _take(self, path: Path, size: int) -> int | None:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        found = os.fstat(descriptor)
        if found.st_nlink and found.st_size == size:
            with suppress(OSError):  # another user's file: readable, but its times cannot be set
                os.utime(descriptor)
            return descriptor
        os.close(descriptor)
        if found.st_nlink:  # truncated, or of another version of the data
            self.discard(path)
        return None

    def _make(self, path: Path, size: int, fill: Fill, wait_s: float) -> None:
        draft = path.with_name(f"{DRAFT}{path.name}")
        with os.fdopen(os.open(draft, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # wait for a process that is already downloading it
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
                # else a process that adds up the files may find it under neither name
                with file_lock(self.folder / LOCK):
                    draft.rename(path)
            except BaseException:
                with suppress(OSError):
                    draft.unlink()
                raise

    def _reserve(self, file: BinaryIO, draft: Path, size: int, wait_s: float) -> None:
        """Evict old shards to make space for a draft, and allocate its bytes on the disk.

        Raises DataError if too many shards are in use for `wait_s` seconds.
        """
        until_s = time.monotonic() + wait_s
        while True:
            with file_lock(self.folder / LOCK):
                self._sweep(draft)
                missing = self._evict(size)
                if missing <= 0:
                    if size:
                        os.posix_fallocate(file.fileno(), 0, size)
                    return
            if time.monotonic() >= until_s:
                raise DataError(
                    (
                        f"the cache {self.folder} has no space for {path_of(draft)}: too much "
                        f"of its {format_bytes(self.most_bytes)} is in use"
                    ),
                    hint="give a larger cache_bytes: several shards for each process that reads",
                )
            time.sleep(0.05)

    def _evict(self, size: int) -> int:
        """Evict unused shards, the least recently used first, to make space for `size` bytes.

        Returns the bytes that are still missing; 0 or less means that there is enough space.
        """
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
            path
            for folder in self.folder.iterdir()
            if folder.is_dir()
            for path in folder.iterdir()
            if path.suffix != ".index"
        ]


def path_of(draft: Path) -> str:
    """Return the file name that a draft gets when its shard is complete."""
    return draft.name.removeprefix(DRAFT)


def _is_named(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_unused(path: Path) -> bool:
    """Remove a file unless a process has locked it; return whether it was removed."""
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
def _as_data_error(path: Path) -> Iterator[None]:
    """Convert an OSError in the block to a DataError about `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache cannot store {path}: {error.strerror or error}",
            hint=hint_unwritten(error, "give another cache"),
        ) from error
