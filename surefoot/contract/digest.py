"""SHA-256 of what is on disk or in memory, in chunks, so that all cores work: the one place that says what a digest is made of.

The digest of bytes is SHA-256 over the SHA-256 digests of their 16 MiB chunks. The digest of a file of tensors is SHA-256 over the
digest of its header and those of its tensors in the order of the file. One core does about 1.9 GiB/s; hashlib lets others run.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from surefoot.core.errors import RunFolderError

CHUNK_BYTES = 16 << 20
READ_BYTES = 1 << 20


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
    buffer = memoryview(bytearray(min(num_bytes, READ_BYTES))) if into is None else into
    done = 0
    while done < num_bytes:
        window = buffer[: min(READ_BYTES, num_bytes - done)] if into is None else buffer[done : done + READ_BYTES]
        count = os.preadv(descriptor, [window], start + done)
        if count == 0:
            raise RunFolderError(f"a file ends {num_bytes - done} bytes early")
        digest.update(window[:count])
        done += count
    if into is None and sys.platform == "linux":  # what is only checked shall not drive other things out of memory
        os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)
    return digest.digest()


def of_file(path: Path) -> str:
    """The plain SHA-256 of a whole file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
