"""Find where the samples of a tar begin, by reading its headers alone.

tarfile parses each header and checks its sum (POSIX.1-1988; IEEE Std 1003.1-2017, pax); the contents between them are not read. What is
rare in shards (long or strange names, links, sizes that pax states) is left to `shards.read_shard`, which names what is wrong.
"""

# N samples

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable

import numpy as np

from surefoot.components.data.tars.shards import BLOCK, is_plain, split_name

FILES, EXTENDED = b"0\0", b"x"  # regular files; what pax says of the next one
RECORD = re.compile(rb"(\d{1,4}) (?:mtime|atime|ctime|uname|gname|comment)=[^\n]*\n")  # what says nothing of name or content
Read = Callable[[int, int], bytes]  # of the file, from a byte on, so many


def find_samples(read: Read, *, most_bytes: int, most_members: int) -> np.ndarray | None:
    """The bytes at which each sample of a tar begins, and where the last one ends: (N + 1,) int64; None where it must be read slowly.

    A sample is a row of members of one key: their name up to the first "." of the file's name. What this takes, `shards.read_shard`
    takes too, and cuts into the same samples.
    """
    starts: list[int] = []
    keys, extensions, last = set[str](), set[str](), None
    at, count, extended = 0, 0, None
    while (block := read(at, BLOCK)) != bytes(BLOCK):
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError, OverflowError):  # the latter two of headers that say nonsense
            return None
        begin, size, at = at, member.size, at + BLOCK + -(-member.size // BLOCK) * BLOCK
        if member.type == EXTENDED and extended is None and 0 <= size <= BLOCK and says_little(read(begin + BLOCK, size)):
            extended = begin  # the next member begins with what is said of it
            continue
        key, extension = split_name(member.name)
        is_file = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and 0 <= size <= most_bytes and is_plain(member.name)
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
    """Whether the records of an extended header are sound, and say nothing of name, size or kind."""
    at = 0
    while at < len(records):
        found = RECORD.match(records, at)
        if found is None or found.end() - at != int(found[1]):
            return False
        at = found.end()
    return True
