"""Search for the samples of a tar, by reading its headers alone.

tarfile parses each header and verifies its checksum (POSIX.1-1988; IEEE Std 1003.1-2017, pax); the
contents between the headers are not read. Rare cases (long or unusual names, links, sizes in pax
headers) are left to `shards.read_shard`, which reports what is wrong.
"""

# N samples

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable

import numpy as np

from surefoot.components.data.tars.shards import BLOCK, is_plain, split_name

FILES, EXTENDED = b"0\0", b"x"  # regular files; pax records about the next member
# records that do not concern name or content
RECORD = re.compile(rb"(\d{1,4}) (?:mtime|atime|ctime|uname|gname|comment)=[^\n]*\n")
Read = Callable[[int, int], bytes]  # (first byte, number of bytes) -> bytes of the file


def find_samples(read: Read, *, most_bytes: int, most_members: int) -> np.ndarray | None:
    """Return the first byte of each sample of a tar, and the end of the last: (N + 1,) int64.

    Returns None for a tar that must be read by the slow method. A sample is a sequence of members
    with one key: the name up to the first "." of the file's name. A tar that this function accepts
    is accepted by `shards.read_shard` too, and split into the same samples.
    """
    starts: list[int] = []
    keys, extensions, last = set[str](), set[str](), None
    at, count, extended = 0, 0, None
    while (block := read(at, BLOCK)) != bytes(BLOCK):
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        # ValueError and OverflowError are for malformed headers
        except (tarfile.HeaderError, ValueError, OverflowError):
            return None
        begin, size, at = at, member.size, at + BLOCK + -(-member.size // BLOCK) * BLOCK
        if (
            member.type == EXTENDED
            and extended is None
            and 0 <= size <= BLOCK
            and says_little(read(begin + BLOCK, size))
        ):
            extended = begin  # the next member begins with its pax header
            continue
        key, extension = split_name(member.name)
        is_file = (
            member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
            and 0 <= size <= most_bytes
            and is_plain(member.name)
        )
        if key != last:
            starts.append(begin if extended is None else extended)
            is_file, extensions = is_file and key not in keys, set()
            keys.add(key)
        count += 1
        if not is_file or extension in extensions or count > most_members:
            return None
        extensions.add(extension)
        last, extended = key, None
    return np.array([*starts, at], dtype=np.int64) if starts and extended is None else None


def says_little(records: bytes) -> bool:
    """Return whether pax records are valid, and do not concern name, size or kind."""
    at = 0
    while at < len(records):
        found = RECORD.match(records, at)
        if found is None or found.end() - at != int(found[1]):
            return False
        at = found.end()
    return True
