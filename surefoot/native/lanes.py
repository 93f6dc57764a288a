"""SHA-256 of many buffers at once, where a processor without instructions for it does up to seven times what hashlib does.

`sha256.c` is compiled when the package is built, if a C compiler is there (hatch_build.py); without it, or on a processor that it
gains nothing on, `num_lanes()` is 0 and hashlib does the work. The digests are the same: the first is compared with hashlib's.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from surefoot.core.errors import InputError

LIBRARY = Path(__file__).with_name("_sha256.so")
BLOCK_BYTES = 64  # of SHA-256
MOST = 16  # lanes of the widest registers; a library that says more is none of ours
FEWEST = 3  # equal buffers that are as fast one after the other by hashlib as side by side
# FIPS 180-4, 5.3.3: the state before the first block
INITIAL = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)


class Lanes:
    """The digests of several messages, each given in parts. Raises InputError for more than this processor takes at once."""

    def __init__(self, num: int) -> None:
        library, width = _open()
        if library is None or not 0 < num <= width:
            raise InputError(f"{num} messages to hash at once; this processor takes 1 to {width}", hint="ask num_lanes() first")
        self._library, self._width, self._num = library, width, num
        self._states = (ctypes.c_uint32 * (8 * num))(*INITIAL * num)
        self._num_bytes = [0] * num
        self._rests = [b""] * num

    def update(self, parts: Sequence[memoryview]) -> None:
        """The next part of each message, which may be empty; copied where the part before it did not end with a whole block of 64."""
        joined = [memoryview(bytearray(rest) + part) if rest else part for rest, part in zip(self._rests, parts, strict=True)]
        self._num_bytes = [count + len(part) for count, part in zip(self._num_bytes, parts, strict=True)]
        self._rests = [bytes(part[len(part) - len(part) % BLOCK_BYTES :]) for part in joined]
        self._run(joined)

    def digests(self) -> list[bytes]:
        """Of each message, once; nothing can be added after it."""
        ends = [_padding(rest, count) for rest, count in zip(self._rests, self._num_bytes, strict=True)]
        self._run([memoryview(end) for end in ends])
        words = [self._states[8 * i : 8 * i + 8] for i in range(self._num)]
        return [b"".join(word.to_bytes(4, "big") for word in each) for each in words]

    def _run(self, parts: Sequence[memoryview]) -> None:
        held = [memoryview(bytearray(part)) if part.readonly else part for part in parts]  # ctypes takes no others
        addresses = (ctypes.c_void_p * self._num)(*map(_address, held))
        blocks = (ctypes.c_size_t * self._num)(*(len(part) // BLOCK_BYTES for part in parts))
        self._library.update(self._width, self._num, self._states, addresses, blocks)  # others run meanwhile


@cache
def num_lanes() -> int:
    """How many messages are hashed side by side here; 0 where hashlib is as fast, or the library was not built."""
    width = _open()[1]
    return width if width and _agree(width) else 0


def share_out(sizes: Sequence[int]) -> list[list[int]]:
    """Groups of buffers of about equal sizes to hash side by side, by their places in `sizes`; groups of one are sooner done by hashlib.

    A group takes as long as its longest, so that a few large ones beside small ones would leave most lanes idle.
    """
    width = num_lanes()
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    groups = []
    while order:
        group = order[:width]
        if FEWEST * max(sizes[order[0]], BLOCK_BYTES) > sum(sizes[i] for i in group):
            group = order[:1]
        groups.append(group)
        del order[: len(group)]
    return groups


@cache
def _open() -> tuple[ctypes.CDLL | None, int]:
    """The library, and how many messages it takes at once."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        width, _ = library.num_lanes(), library.update
    except (OSError, InputError, AttributeError):  # not built; another; or a process that reads what strangers wrote
        return None, 0
    return (library, width) if 0 <= width <= MOST else (None, 0)


def _agree(width: int) -> bool:
    """Whether all lanes say what hashlib says: a library that was built wrongly, or for another machine, hashes nothing."""
    messages = [bytearray(range(lane, lane + 200)) for lane in range(width)]
    lanes = Lanes(width)
    lanes.update([memoryview(each) for each in messages])
    return lanes.digests() == [hashlib.sha256(each).digest() for each in messages]


def _padding(rest: bytes, num_bytes: int) -> bytearray:
    """What ends a message (FIPS 180-4, 5.1.1): a bit, zeros, and its length in bits, to whole blocks."""
    zeros = -(len(rest) + 1 + 8) % BLOCK_BYTES
    return bytearray(rest + b"\x80" + bytes(zeros) + (8 * num_bytes).to_bytes(8, "big"))


def _address(part: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(part)) if part else 0
