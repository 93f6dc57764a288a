"""Map files into memory without keeping a file descriptor open.

Python's mmap keeps a descriptor open for each mapping, but a process can often open only 1,024.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from functools import cache
from typing import Any


def map_file(descriptor: int, size: int) -> Any:
    """Map the first `size` bytes of a file into memory that all processes with that file share.

    Returns a ctypes array of bytes, which is unmapped when it is garbage-collected; None if the
    system refuses the mapping.
    """
    calls = _calls()
    address = calls.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0
    )
    if address == ctypes.c_void_p(-1).value:
        return None
    made = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(made, calls.munmap, address, size).atexit = False
    return made


def release_pages(address: int, size: int) -> None:
    """Release the physical memory of a mapped range; its content stays in the file.

    The content is read again when the range is accessed. The call is madvise(2) with MADV_DONTNEED.
    """
    _calls().madvise(address, size, mmap.MADV_DONTNEED)


@cache
def _calls() -> Any:
    calls = ctypes.CDLL(None, use_errno=True)
    calls.mmap.restype = ctypes.c_void_p
    calls.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    calls.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    calls.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return calls
