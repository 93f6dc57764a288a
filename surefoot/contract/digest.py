"""SHA-256 digests of data on disk or in memory, computed on all cores in parallel.

This module defines every digest. The digest of bytes is the SHA-256 of the SHA-256 digests of their
16 MiB chunks. The digest of a safetensors file is the SHA-256 of the digest of its header and the
digests of its tensors in the order of the file.

If the processor has no instructions for SHA-256, several chunks are hashed at once
(`native/lanes.py`). Otherwise hashlib hashes each chunk. Both release the GIL.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import mmap
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.core.errors import RunFolderError
from surefoot.native import lanes

if sys.platform != "win32":
    import fcntl

CHUNK_BYTES = 16 << 20
DIRECT = getattr(os, "O_DIRECT", 0)  # Linux; open(2)
BLOCK_BYTES = 4096  # direct reads and writes take whole blocks, in block-aligned memory
READ_BYTES = 2 << 20  # whole blocks
LANE_BYTES = 1 << 19  # whole blocks, where a thread reads up to 16 chunks at once
LARGE_BYTES = 1 << 20  # from this mean size on direct reads are faster than reads through the cache
HUGE_BYTES = 2 << 20  # of a huge page, on most processors


def combine(digests: Iterable[bytes]) -> str:
    """Return the SHA-256 of the concatenated digests, as hex."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def chunks(num_bytes: int) -> list[tuple[int, int]]:
    """Return (start, end) of each 16 MiB chunk of `num_bytes` bytes; for 0 bytes, an empty one."""
    return [
        (start, min(start + CHUNK_BYTES, num_bytes))
        for start in range(0, max(num_bytes, 1), CHUNK_BYTES)
    ]


@dataclass(frozen=True)
class Pending:
    """Digests that threads are still computing.

    `parts` has, for each name, its chunks in order: the group with which a chunk is hashed, and its
    index there.
    """

    # the group that a chunk is hashed with, its index there
    parts: Mapping[str, list[tuple[Future[list[bytes]], int]]]

    def finish(self) -> dict[str, str]:
        """Wait for the threads, and return the digest of each name, as hex.

        An exception in a thread is raised here too.
        """
        return {
            name: combine(group.result()[place] for group, place in parts)
            for name, parts in self.parts.items()
        }


def begin(pool: Executor, buffers: Mapping[str, memoryview]) -> Pending:
    """Start hashing byte buffers in the threads of `pool`, and return the pending digests.

    The buffers must not change until `Pending.finish` returns.
    """
    spans = [(name, span) for name, buffer in buffers.items() for span in chunks(len(buffer))]
    return _begin(
        pool, [(name, _MemoryChunk(buffers[name][start:stop])) for name, (start, stop) in spans]
    )


def begin_read(
    pool: Executor,
    descriptor: int,
    spans: Mapping[str, tuple[int, int]],
    into: Mapping[str, memoryview] | None = None,
) -> Pending:
    """Start hashing parts of an open file, each given as (first byte, byte after the last).

    `into` may map the name of a part to a buffer that receives its bytes. Exactly the bytes in the
    buffer are then hashed.
    """
    work: list[tuple[str, _Chunk]] = []
    for name, (start, stop) in spans.items():
        room = (into or {}).get(name)
        for first, last in chunks(stop - start):
            work.append(
                (
                    name,
                    _FileChunk(
                        descriptor,
                        start + first,
                        last - first,
                        None if room is None else room[first:last],
                    ),
                )
            )
    return _begin(pool, work)


def digest_of_bytes(data: Any) -> str:
    """Return the digest of a buffer, computed in the calling thread."""
    buffer = memoryview(data).cast("B")
    return combine(
        hashlib.sha256(buffer[start:stop]).digest() for start, stop in chunks(len(buffer))
    )


@dataclass(frozen=True)
class _MemoryChunk:
    """Chunk of data in memory."""

    buffer: memoryview

    @property
    def num_bytes(self) -> int:
        return len(self.buffer)

    def parts(self, room: memoryview) -> Iterator[memoryview]:
        """Yield the chunk; the read buffer `room` is not used."""
        yield self.buffer


@dataclass(frozen=True)
class _FileChunk:
    """Chunk of an open file; its bytes are copied to `into`, unless that is None."""

    descriptor: int
    start: int
    num_bytes: int
    into: memoryview | None

    def parts(self, room: memoryview) -> Iterator[memoryview]:
        """Read the chunk and yield it in parts, which are stored in the read buffer `room`.

        The size of each part but the last is a multiple of SHA-256's block size.
        """
        done = 0
        for window in windows(self.descriptor, self.start, self.num_bytes, room):
            if self.into is not None:
                self.into[done : done + len(window)] = window
            done += len(window)
            yield window


_Chunk = _MemoryChunk | _FileChunk


def _begin(pool: Executor, work: Sequence[tuple[str, _Chunk]]) -> Pending:
    """Start hashing named chunks, several at once in a thread if that is faster."""
    found: dict[int, tuple[Future[list[bytes]], int]] = {}
    for group in lanes.group_by_size([chunk.num_bytes for _, chunk in work]):
        digests = pool.submit(_hash, [work[i][1] for i in group])
        found |= {i: (digests, place) for place, i in enumerate(group)}
    parts: dict[str, list[tuple[Future[list[bytes]], int]]] = {}
    for i, (name, _) in enumerate(work):
        parts.setdefault(name, []).append(found[i])
    return Pending(parts)


def _hash(group: Sequence[_Chunk]) -> list[bytes]:
    rooms = _make_chunk_buffers(group)
    if len(group) == 1:
        digest = hashlib.sha256()
        for part in group[0].parts(rooms[0]):
            digest.update(part)
        return [digest.digest()]
    side_by_side = lanes.Lanes(len(group))
    parts_of_each = (chunk.parts(room) for chunk, room in zip(group, rooms, strict=True))
    for parts in itertools.zip_longest(*parts_of_each, fillvalue=memoryview(b"")):
        side_by_side.update(parts)
    return side_by_side.digests()


def _make_chunk_buffers(group: Sequence[_Chunk]) -> list[memoryview]:
    """Return a read buffer for each chunk; the buffers are empty if no chunk is in a file."""
    stored = [chunk.num_bytes for chunk in group if isinstance(chunk, _FileChunk)]
    if not stored:
        return [memoryview(b"")] * len(group)
    each = min(
        READ_BYTES if len(group) == 1 else LANE_BYTES, _whole_blocks(max(stored)) + BLOCK_BYTES
    )
    room = make_room(each * len(group))
    return [room[i * each : (i + 1) * each] for i in range(len(group))]


def digest_of_file(path: Path) -> str:
    """Return the plain SHA-256 of a whole file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- past the page cache: data that is only checked, or loaded once, evicts nothing else


def read_directly(descriptor: int, sizes: Collection[int]) -> None:
    """Switch an open file to direct reads if the parts to read are large on average.

    `sizes` are their sizes in bytes. Small parts are read faster through the page cache. Nothing
    changes if the file system does not support direct reads.
    """
    if sum(sizes) >= len(sizes) * LARGE_BYTES:
        try:
            set_direct(descriptor, wanted=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


def make_room(num_bytes: int) -> memoryview:
    """Return a page-aligned buffer, in huge pages if the system has them.

    A direct read into small pages is split where they are not adjacent in physical memory, which
    takes up to twice as long.
    """
    # private to this process: shared memory gets no huge pages
    memory = mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY)
    if num_bytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def windows(descriptor: int, start: int, num_bytes: int, room: memoryview) -> Iterator[memoryview]:
    """Read bytes of a file from `start` on, and yield them in parts stored in the buffer `room`.

    `room` must come from `make_room`. A part is valid until the next one is requested. The size of
    each part but the last is a multiple of SHA-256's block size. Raises RunFolderError if the file
    ends early.
    """
    stop = start + num_bytes
    while start < stop:
        skipped = start % BLOCK_BYTES
        wanted = min(len(room), _whole_blocks(skipped + stop - start))
        count = (
            _read_blocks(descriptor, room[:wanted], start - skipped, skipped + stop - start)
            - skipped
        )
        if count < min(lanes.BLOCK_BYTES, stop - start):
            raise RunFolderError(f"the file is {stop - start - max(count, 0)} bytes too short")
        window = room[skipped : skipped + min(count, stop - start)]
        if start + len(window) < stop:
            window = window[: len(window) - len(window) % lanes.BLOCK_BYTES]
        yield window
        start += len(window)


def _read_blocks(descriptor: int, blocks: memoryview, start: int, needed: int) -> int:
    """Read into `blocks`, at least its first `needed` bytes, and return the number of bytes read.

    The number is smaller if the file ends earlier.
    """
    done = 0
    while done < min(needed, len(blocks)) and (
        count := _read_some(descriptor, blocks[done:], start + done)
    ):
        done += count
    return done


def _read_some(descriptor: int, block: memoryview, start: int) -> int:
    try:
        return os.preadv(descriptor, [block], start)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        set_direct(descriptor, wanted=False)
        return os.preadv(descriptor, [block], start)


def set_direct(descriptor: int, *, wanted: bool) -> bool:
    """Switch direct reads and writes (O_DIRECT) of an open file; return whether the mode changed.

    Raises OSError if the file system refuses.
    """
    if not DIRECT:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & DIRECT) is wanted:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ DIRECT)
    return True
