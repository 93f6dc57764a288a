"""Writing of large new files with direct I/O, which bypasses the page cache.

A save then takes no memory from training. If the system does not support direct I/O (tmpfs, some
network file systems, macOS), the same bytes are written through the page cache.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from surefoot.contract.digest import BLOCK_BYTES, DIRECT, set_direct

BUFFER_BYTES = 4 << 20  # larger buffers take longer to allocate than they save


def write_new(path: Path, buffers: Iterable[memoryview]) -> None:
    """Write the bytes of `buffers` in order into a new file, and sync it to disk.

    Raises OSError, for example FileExistsError if the file exists.
    """
    descriptor = _open_new(path)
    try:
        for block in _prefetch_blocks(_aligned_blocks(buffers)):
            _write(descriptor, block)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prefetch_blocks(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield `blocks`, while a second thread fills the next block.

    A first block that is not full is the only one; it is yielded without a second thread.
    """
    block = next(blocks, None)
    if block is not None and len(block) < BUFFER_BYTES:
        yield block
        return
    with ThreadPoolExecutor(1, thread_name_prefix="surefoot-copy") as copier:
        while block is not None:
            following: Future[np.ndarray | None] = copier.submit(next, blocks, None)
            yield block
            block = following.result()


def _aligned_blocks(buffers: Iterable[memoryview]) -> Iterator[np.ndarray]:
    """Yield the bytes of `buffers` in memory-aligned blocks of BUFFER_BYTES.

    The last block may be shorter. A block stays valid until the second block after it is requested.
    """
    room = np.empty(2 * BUFFER_BYTES + BLOCK_BYTES, np.uint8)
    start = -room.ctypes.data % BLOCK_BYTES
    blocks = itertools.cycle(
        (room[start:][:BUFFER_BYTES], room[start + BUFFER_BYTES :][:BUFFER_BYTES])
    )
    block, filled = next(blocks), 0
    for buffer in buffers:
        values, done = np.frombuffer(buffer, np.uint8), 0
        while done < len(values):
            count = min(len(values) - done, BUFFER_BYTES - filled)
            # numpy releases the GIL during this copy, so training continues
            block[filled : filled + count] = values[done : done + count]
            filled, done = filled + count, done + count
            if filled == BUFFER_BYTES:
                yield block
                block, filled = next(blocks), 0
    if filled:
        yield block[:filled]


def _write(descriptor: int, block: np.ndarray) -> None:
    """Write `block` to a file with direct I/O.

    Direct I/O needs a multiple of BLOCK_BYTES. The remaining bytes at the end of the block are
    written through the page cache.
    """
    whole = len(block) - len(block) % BLOCK_BYTES
    _write_all(descriptor, block[:whole].data)
    if whole < len(block):
        set_direct(descriptor, wanted=False)
        _write_all(descriptor, block[whole:].data)


def _open_new(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL or not DIRECT:
            raise
    path.unlink(missing_ok=True)  # some file systems create the file before they refuse direct I/O
    return os.open(path, flags, 0o666)


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        try:
            block = block[os.write(descriptor, block) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not set_direct(descriptor, wanted=False):
                raise
