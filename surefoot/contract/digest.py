"""SHA-256 of what is on disk or in memory, in chunks, so that all cores work: the one place that says what a digest is made of.

The digest of bytes is SHA-256 over the SHA-256 digests of their 16 MiB chunks. The digest of a file of tensors is SHA-256 over the
digest of its header and those of its tensors in the order of the file. One core does about 1.9 GiB/s; hashlib lets others run.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from surefoot.core.errors import RunFolderError

if sys.platform != "win32":
    import fcntl

CHUNK_BYTES = 16 << 20
DIRECT = getattr(os, "O_DIRECT", 0)  # Linux; open(2)
BLOCK_BYTES = 4096  # of which a direct read or write takes whole ones, in memory that begins at one
READ_BYTES = 1 << 20  # whole blocks


def combine(digests: Iterable[bytes]) -> str:
    """The digest over digests, as hex."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def chunks(num_bytes: int) -> list[tuple[int, int]]:
    """Where each chunk begins and ends; one empty chunk for no bytes."""
    return [(start, min(start + CHUNK_BYTES, num_bytes)) for start in range(0, max(num_bytes, 1), CHUNK_BYTES)]


def begin(pool: Executor, buffer: memoryview) -> list[Future[bytes]]:
    """Begin to hash a buffer (of bytes) that must not change until the last of these is done."""
    return [pool.submit(_hash, buffer[start:stop]) for start, stop in chunks(len(buffer))]


def finish(parts: Iterable[Future[bytes]]) -> str:
    return combine(part.result() for part in parts)


def of_bytes(data: Any) -> str:
    """The digest of a buffer, on this thread alone."""
    buffer = memoryview(data).cast("B")
    return combine(_hash(buffer[start:stop]) for start, stop in chunks(len(buffer)))


def _hash(buffer: memoryview) -> bytes:
    return hashlib.sha256(buffer).digest()


def begin_read(pool: Executor, descriptor: int, start: int, stop: int, into: memoryview | None = None) -> list[Future[bytes]]:
    """Begin to hash bytes `start` to `stop` of an open file; `into` receives them: what was hashed is what is held."""
    return [
        pool.submit(_read, descriptor, start + first, last - first, None if into is None else into[first:last])
        for first, last in chunks(stop - start)
    ]


def _read(descriptor: int, start: int, num_bytes: int, into: memoryview | None) -> bytes:
    digest = hashlib.sha256()
    done = 0
    for window in windows(descriptor, start, num_bytes):
        digest.update(window)
        if into is not None:
            into[done : done + len(window)] = window
        done += len(window)
    return digest.digest()


def of_file(path: Path) -> str:
    """The plain SHA-256 of a whole file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- past the page cache: what is only checked, or loaded once, drives nothing else out of memory


def read_directly(descriptor: int, sizes: Collection[int]) -> None:
    """Read parts of these sizes of an open file directly from now on, where its system can; small ones come faster through the cache."""
    if sum(sizes) >= len(sizes) * READ_BYTES:
        try:
            set_direct(descriptor, wanted=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


def windows(descriptor: int, start: int, num_bytes: int) -> Iterator[memoryview]:
    """The bytes from `start` on, in parts that hold until the next is asked for. Raises RunFolderError for a file that ends early."""
    room, stop = memoryview(mmap.mmap(-1, READ_BYTES)), start + num_bytes
    while start < stop:
        skipped = start % BLOCK_BYTES
        wanted = min(READ_BYTES, -(-(skipped + stop - start) // BLOCK_BYTES) * BLOCK_BYTES)
        count = _read_block(descriptor, room[:wanted], start - skipped) - skipped
        if count <= 0:
            raise RunFolderError(f"a file ends {stop - start} bytes early")
        window = room[skipped : skipped + min(count, stop - start)]
        yield window
        start += len(window)


def _read_block(descriptor: int, block: memoryview, start: int) -> int:
    try:
        return os.preadv(descriptor, [block], start)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        set_direct(descriptor, wanted=False)
        return os.preadv(descriptor, [block], start)


def set_direct(descriptor: int, *, wanted: bool) -> bool:
    """Let an open file be read and written past the page cache, or not; gives whether that changed. Raises OSError where it cannot be."""
    if not DIRECT:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & DIRECT) is wanted:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ DIRECT)
    return True
