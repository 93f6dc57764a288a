"""SHA-256 of what is on disk or in memory, in chunks, so that all cores work: the one place that says what a digest is made of.

The digest of bytes is SHA-256 over the SHA-256 digests of their 16 MiB chunks. The digest of a file of tensors is SHA-256 over the
digest of its header and those of its tensors in the order of the file. Chunks are hashed side by side where a processor has no
instructions for SHA-256 (`native/lanes.py`), else each by hashlib; both let other threads run.
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
BLOCK_BYTES = 4096  # of which a direct read or write takes whole ones, in memory that begins at one
READ_BYTES = 2 << 20  # whole blocks
LANE_BYTES = 1 << 19  # the same, where a thread reads up to 16 chunks side by side
LARGE_BYTES = 1 << 20  # from this mean size on parts come faster directly than through the cache
HUGE_BYTES = 2 << 20  # of a huge page, on most processors


def combine(digests: Iterable[bytes]) -> str:
    """The digest over digests, as hex."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def chunks(num_bytes: int) -> list[tuple[int, int]]:
    """Where each chunk begins and ends; one empty chunk for no bytes."""
    return [(start, min(start + CHUNK_BYTES, num_bytes)) for start in range(0, max(num_bytes, 1), CHUNK_BYTES)]


@dataclass(frozen=True)
class Pending:
    """Digests that threads are at work on: for each name those of its chunks, in their order."""

    parts: Mapping[str, list[tuple[Future[list[bytes]], int]]]  # the group that each is hashed with, and its place there

    def finish(self) -> dict[str, str]:
        """The digest under each name, as hex; waits for them. Raises what a thread raised."""
        return {name: combine(group.result()[place] for group, place in parts) for name, parts in self.parts.items()}


def begin(pool: Executor, buffers: Mapping[str, memoryview]) -> Pending:
    """Begin to hash buffers (of bytes) that must not change until the last of them is done."""
    spans = [(name, span) for name, buffer in buffers.items() for span in chunks(len(buffer))]
    return _begin(pool, [(name, _Held(buffers[name][start:stop])) for name, (start, stop) in spans])


def begin_read(
    pool: Executor, descriptor: int, spans: Mapping[str, tuple[int, int]], into: Mapping[str, memoryview] | None = None
) -> Pending:
    """Begin to hash parts of an open file, each from a first byte to the one after its last.

    `into` holds the memory that receives a part, where one is wanted: what was hashed is what is held.
    """
    work: list[tuple[str, _Chunk]] = []
    for name, (start, stop) in spans.items():
        room = (into or {}).get(name)
        for first, last in chunks(stop - start):
            work.append((name, _Stored(descriptor, start + first, last - first, None if room is None else room[first:last])))
    return _begin(pool, work)


def of_bytes(data: Any) -> str:
    """The digest of a buffer, on this thread alone."""
    buffer = memoryview(data).cast("B")
    return combine(hashlib.sha256(buffer[start:stop]).digest() for start, stop in chunks(len(buffer)))


@dataclass(frozen=True)
class _Held:
    """A chunk in memory."""

    buffer: memoryview

    @property
    def num_bytes(self) -> int:
        return len(self.buffer)

    def parts(self, room: memoryview) -> Iterator[memoryview]:
        """Its bytes, in parts of which all but the last are whole blocks of SHA-256: one, which needs no room."""
        yield self.buffer


@dataclass(frozen=True)
class _Stored:
    """A chunk in an open file."""

    descriptor: int
    start: int
    num_bytes: int
    into: memoryview | None

    def parts(self, room: memoryview) -> Iterator[memoryview]:
        """Its bytes, in parts that lie in `room`, of which all but the last are whole blocks of SHA-256."""
        done = 0
        for window in windows(self.descriptor, self.start, self.num_bytes, room):
            if self.into is not None:
                self.into[done : done + len(window)] = window
            done += len(window)
            yield window


_Chunk = _Held | _Stored


def _begin(pool: Executor, work: Sequence[tuple[str, _Chunk]]) -> Pending:
    """Chunks side by side where that is faster, and each alone where it is not."""
    found: dict[int, tuple[Future[list[bytes]], int]] = {}
    for group in lanes.share_out([chunk.num_bytes for _, chunk in work]):
        digests = pool.submit(_hash, [work[i][1] for i in group])
        found |= {i: (digests, place) for place, i in enumerate(group)}
    parts: dict[str, list[tuple[Future[list[bytes]], int]]] = {}
    for i, (name, _) in enumerate(work):
        parts.setdefault(name, []).append(found[i])
    return Pending(parts)


def _hash(group: Sequence[_Chunk]) -> list[bytes]:
    rooms = _rooms(group)
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


def _rooms(group: Sequence[_Chunk]) -> list[memoryview]:
    """Memory that each chunk of a file is read into, a part at a time."""
    stored = [chunk.num_bytes for chunk in group if isinstance(chunk, _Stored)]
    if not stored:
        return [memoryview(b"")] * len(group)
    each = min(READ_BYTES if len(group) == 1 else LANE_BYTES, _whole_blocks(max(stored)) + BLOCK_BYTES)
    room = make_room(each * len(group))
    return [room[i * each : (i + 1) * each] for i in range(len(group))]


def of_file(path: Path) -> str:
    """The plain SHA-256 of a whole file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- past the page cache: what is only checked, or loaded once, drives nothing else out of memory


def read_directly(descriptor: int, sizes: Collection[int]) -> None:
    """Read parts of these sizes of an open file directly from now on, where its system can; small ones come faster through the cache."""
    if sum(sizes) >= len(sizes) * LARGE_BYTES:
        try:
            set_direct(descriptor, wanted=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


def make_room(num_bytes: int) -> memoryview:
    """Memory that begins at a page, in huge pages where the system has them.

    A direct read into small ones is cut where they do not lie side by side, and takes up to twice as long.
    """
    memory = mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY)  # of this process alone: shared memory gets no huge pages
    if num_bytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def windows(descriptor: int, start: int, num_bytes: int, room: memoryview) -> Iterator[memoryview]:
    """The bytes from `start` on, in parts that lie in `room` (from `make_room`) and hold until the next is asked for.

    All but the last are of whole blocks of SHA-256. Raises RunFolderError for a file that ends early.
    """
    stop = start + num_bytes
    while start < stop:
        skipped = start % BLOCK_BYTES
        wanted = min(len(room), _whole_blocks(skipped + stop - start))
        count = _read_blocks(descriptor, room[:wanted], start - skipped, skipped + stop - start) - skipped
        if count < min(lanes.BLOCK_BYTES, stop - start):
            raise RunFolderError(f"a file ends {stop - start - max(count, 0)} bytes early")
        window = room[skipped : skipped + min(count, stop - start)]
        if start + len(window) < stop:
            window = window[: len(window) - len(window) % lanes.BLOCK_BYTES]
        yield window
        start += len(window)


def _read_blocks(descriptor: int, blocks: memoryview, start: int, needed: int) -> int:
    """Fill `blocks`, or their first `needed` bytes, unless the file ends before; gives how many bytes were had."""
    done = 0
    while done < min(needed, len(blocks)) and (count := _read_some(descriptor, blocks[done:], start + done)):
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
    """Let an open file be read and written past the page cache, or not; gives whether that changed. Raises OSError where it cannot be."""
    if not DIRECT:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & DIRECT) is wanted:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ DIRECT)
    return True
