"""SHA-256 of many buffers at once with SIMD, for processors without SHA-256 instructions.

On such processors, it is up to seven times as fast as hashlib. `sha256.c` is compiled when the
package is built, if a C compiler is available (hatch_build.py). If it was not compiled, or if it is
not faster on this processor, `num_lanes()` is 0 and hashlib is used. Before the first use, some
digests are compared with those of hashlib.
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
MAX_LANES = 16  # lanes of the widest registers; a library with more is not this one
FEWEST = 3  # this many equal buffers are hashed as fast one after the other by hashlib as at once
# FIPS 180-4, 5.3.3: the state before the first block
INITIAL = (
    0x6A09E667,
    0xBB67AE85,
    0x3C6EF372,
    0xA54FF53A,
    0x510E527F,
    0x9B05688C,
    0x1F83D9AB,
    0x5BE0CD19,
)


class Lanes:
    """SHA-256 hashes of `num` messages at once; the data of each message is added in parts.

    Raises InputError if this processor cannot hash `num` messages at once.
    """

    def __init__(self, num: int) -> None:
        library, width = _open()
        if library is None or not 0 < num <= width:
            raise InputError(
                f"{num} messages to hash at once; this processor takes 1 to {width}",
                hint="ask num_lanes() first",
            )
        self._library, self._width, self._num = library, width, num
        self._states = (ctypes.c_uint32 * (8 * num))(*INITIAL * num)
        self._num_bytes = [0] * num
        self._rests = [b""] * num

    def update(self, parts: Sequence[memoryview]) -> None:
        """Add the next part of each message; a part may be empty.

        A part is copied if the data of its message before it is not a multiple of 64 bytes long.
        """
        joined = [
            memoryview(bytearray(rest) + part) if rest else part
            for rest, part in zip(self._rests, parts, strict=True)
        ]
        self._num_bytes = [
            count + len(part) for count, part in zip(self._num_bytes, parts, strict=True)
        ]
        self._rests = [bytes(part[len(part) - len(part) % BLOCK_BYTES :]) for part in joined]
        self._run(joined)

    def digests(self) -> list[bytes]:
        """Return the digest of each message.

        Call this method only once, after all parts were added.
        """
        ends = [
            _padding(rest, count) for rest, count in zip(self._rests, self._num_bytes, strict=True)
        ]
        self._run([memoryview(end) for end in ends])
        words = [self._states[8 * i : 8 * i + 8] for i in range(self._num)]
        return [b"".join(word.to_bytes(4, "big") for word in each) for each in words]

    def _run(self, parts: Sequence[memoryview]) -> None:
        # ctypes accepts writable buffers only
        held = [memoryview(bytearray(part)) if part.readonly else part for part in parts]
        addresses = (ctypes.c_void_p * self._num)(*map(_address, held))
        blocks = (ctypes.c_size_t * self._num)(*(len(part) // BLOCK_BYTES for part in parts))
        # releases the GIL
        self._library.update(self._width, self._num, self._states, addresses, blocks)


@cache
def num_lanes() -> int:
    """Return the number of messages that are hashed at once on this processor.

    It is 0 if hashlib should be used, because hashlib is as fast or the library was not built.
    """
    width = _open()[1]
    return width if width and _agree(width) else 0


def group_by_size(sizes: Sequence[int]) -> list[list[int]]:
    """Return groups of buffers with similar sizes to hash at once, as indices into `sizes`.

    A group takes as long as its largest buffer. A few large buffers together with small ones would
    therefore leave most lanes idle. A buffer that is alone in its group is hashed faster by
    hashlib.
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
    """Return the compiled library, and the number of messages that it hashes at once.

    Return None and 0 if there is no usable library.
    """
    try:
        library = ctypes.CDLL(str(LIBRARY))
        width, _ = library.num_lanes(), library.update
    except (OSError, InputError, AttributeError):
        # not built; a different library; or a process that reads untrusted data
        return None, 0
    return (library, width) if 0 <= width <= MAX_LANES else (None, 0)


def _agree(width: int) -> bool:
    """Return whether all lanes compute the same digests as hashlib.

    A library that was built incorrectly, or for a different machine, is not used.
    """
    messages = [bytearray(range(lane, lane + 200)) for lane in range(width)]
    lanes = Lanes(width)
    lanes.update([memoryview(each) for each in messages])
    return lanes.digests() == [hashlib.sha256(each).digest() for each in messages]


def _padding(rest: bytes, num_bytes: int) -> bytearray:
    """Return the last bytes `rest` of a message, followed by its padding (FIPS 180-4, 5.1.1).

    The padding is a 1 bit, zeros, and the length of the message in bits. The result consists of
    complete blocks of 64 bytes.
    """
    zeros = -(len(rest) + 1 + 8) % BLOCK_BYTES
    return bytearray(rest + b"\x80" + bytes(zeros) + (8 * num_bytes).to_bytes(8, "big"))


def _address(part: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(part)) if part else 0
