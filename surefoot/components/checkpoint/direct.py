"""Writing a large new file past the page cache, so that a save takes neither memory nor another copy's time from the training.

Where the system refuses direct writes (tmpfs, some network file systems; macOS), the same bytes go through the cache.
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

BUFFER_BYTES = 4 << 20  # more would take longer to be had from the system than it saves


def write_new(path: Path, buffers: Iterable[memoryview]) -> None:
    """Write the bytes of `buffers` one after the other into a new file, and sync it. Raises OSError."""
    descriptor = _open_new(path)
    try:
        for block in _filled_ahead(_joined(buffers)):
            _write(descriptor, block)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _filled_ahead(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The same blocks; while one is used another thread fills the next, if there can be one."""
    block = next(blocks, None)
    if block is not None and len(block) < BUFFER_BYTES:
        yield block
        return
    with ThreadPoolExecutor(1, thread_name_prefix="surefoot-copy") as copier:
        while block is not None:
            following: Future[np.ndarray | None] = copier.submit(next, blocks, None)
            yield block
            block = following.result()


def _joined(buffers: Iterable[memoryview]) -> Iterator[np.ndarray]:
    """The bytes of `buffers` in blocks that begin at a page, all whole but the last; each holds until the next but one is asked for."""
    room = np.empty(2 * BUFFER_BYTES + BLOCK_BYTES, np.uint8)
    start = -room.ctypes.data % BLOCK_BYTES
    blocks = itertools.cycle((room[start:][:BUFFER_BYTES], room[start + BUFFER_BYTES :][:BUFFER_BYTES]))
    block, filled = next(blocks), 0
    for buffer in buffers:
        values, done = np.frombuffer(buffer, np.uint8), 0
        while done < len(values):
            count = min(len(values) - done, BUFFER_BYTES - filled)
            block[filled : filled + count] = values[done : done + count]  # by numpy, which lets the training go on meanwhile
            filled, done = filled + count, done + count
            if filled == BUFFER_BYTES:
                yield block
                block, filled = next(blocks), 0
    if filled:
        yield block[:filled]


def _write(descriptor: int, block: np.ndarray) -> None:
    """Whole blocks directly, and what is left at the end through the cache."""
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
    path.unlink(missing_ok=True)  # some systems make the file before they refuse
    return os.open(path, flags, 0o666)


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        try:
            block = block[os.write(descriptor, block) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not set_direct(descriptor, wanted=False):
                raise
