"""Where the samples of a tar begin, from its headers alone, all of them at once.

A header is a block of 512 bytes that says "ustar" at byte 257 (POSIX.1-1988; IEEE Std 1003.1-2017, pax). Blocks that say so are found
by one strided look at the file, their fields are read as columns, and the chain is followed: each member begins where the one before
it ends. What is rare in shards (old headers, long or strange names, links, sizes beyond octal) is left to `shards.read_shard`, which
reads member by member and says what is wrong.
"""

# M members, N samples

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

BLOCK = 512
NAME_BYTES, PREFIX_BYTES = 100, 155
NAME, SIZE, CHECKSUM, KIND, MAGIC, PREFIX = 0, 124, 148, 156, 257, 345  # where a field begins
NUMBERS = ((100, 8), (108, 8), (116, 8), (136, 12), (329, 8), (337, 8))  # mode, owner, group, time, device: numbers, or empty
USTA = int.from_bytes(b"usta", "little")
FILES, EXTENDED = b"0\0", b"x"  # regular files; what pax says of the next one
CHUNK_ROWS = 1 << 17  # looked at together: 64 MiB
RECORD = re.compile(rb"(\d{1,4}) (?:mtime|atime|ctime|uname|gname|comment)=[^\n]*\n")  # what says nothing of name or content
PLAIN = np.zeros(256, dtype=bool)
PLAIN[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/\0")] = True
BEGINS = PLAIN.copy()
BEGINS[list(b"._-/\0")] = False


class Heads:
    """The blocks of a tar that look like a header, while it goes by in pieces: a file that shrinks meanwhile ends early, and no more."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self._at: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []

    def add(self, piece: np.ndarray) -> None:
        """The next bytes, uint8: whole blocks, but for the last piece."""
        blocks = piece[: len(piece) // BLOCK * BLOCK].reshape(-1, BLOCK)
        words = blocks[:, MAGIC : MAGIC + 4].view("<u4")[:, 0]
        found = np.flatnonzero((words == USTA) & (blocks[:, MAGIC + 4] == ord("r")))
        self._at.append(self.num_blocks + found)
        self._rows.append(blocks[found])
        self.num_blocks += len(blocks)

    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each stands, in blocks (M,), and what it holds (M, 512)."""
        return np.concatenate(self._at), np.concatenate(self._rows)


Read = Callable[[int, int], bytes]  # of the file, from a byte on, so many


def find_samples(heads: Heads, read: Read, *, most_bytes: int, most_members: int) -> np.ndarray | None:
    """The bytes at which each sample of a tar begins, and where the last one ends: (N + 1,) int64; None where it must be read slowly.

    A sample is a row of members of one key: their name up to the first "." of the file's name. What this takes, `shards.read_shard`
    takes too, and cuts into the same samples.
    """
    if heads.num_blocks == 0:
        return None
    followed = _follow(*heads.all())
    if followed is None:
        return None
    at, rows, ends, sizes = followed
    kinds = rows[:, KIND]
    is_file = (kinds == FILES[0]) | (kinds == FILES[1])
    if len(at) > most_members or not is_file[-1] or (sizes[is_file] > most_bytes).any():
        return None
    if not _add_up(rows) or read(int(ends[-1]) * BLOCK, BLOCK) != bytes(BLOCK):
        return None
    extended = np.flatnonzero(~is_file)
    if (kinds[extended] != EXTENDED[0]).any() or (np.diff(extended) == 1).any() or (sizes[extended] > BLOCK).any():
        return None
    said = zip((at[extended] + 1).tolist(), sizes[extended].tolist(), strict=True)
    if not all(says_little(read(place * BLOCK, size)) for place, size in said):
        return None
    begins = at[is_file].copy()
    begins[np.searchsorted(np.flatnonzero(is_file), extended)] = at[extended]  # a member begins with what is said of it
    first = _find_firsts(rows[is_file])
    return None if first is None else np.append(begins[first], ends[-1]) * BLOCK


def _follow(at: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """The headers on the chain from the first block on: where each stands, what it holds, where its member ends, and its size in bytes.

    Places are in blocks. None where the chain does not begin.
    """
    if len(at) == 0 or at[0] != 0:
        return None
    sizes = _read_octal(rows[:, SIZE : SIZE + 12])
    if sizes is None:
        return None
    ends = at + 1 + -(-sizes // BLOCK)
    if np.array_equal(ends[:-1], at[1:]):
        return at, rows, ends, sizes
    chosen, place = [], 0  # a block inside of a member looks like a header, too
    following = np.searchsorted(at, ends)
    while place < len(at):
        chosen.append(place)
        after = int(following[place])
        if after < len(at) and at[after] != ends[place]:
            break
        place = after
    return at[chosen], rows[chosen], ends[chosen], sizes[chosen]


def _read_octal(fields: np.ndarray) -> np.ndarray | None:
    """Numbers (M,) int64 out of fields (M, width) of octal digits, then spaces and zeros alone; None where one is no such number."""
    digits = fields.astype(np.int64) - ord("0")
    is_digit = (digits >= 0) & (digits < 8)
    ended = np.logical_or.accumulate(~is_digit, axis=1)
    if not (is_digit | (fields == 0) | (fields == ord(" "))).all() or (ended & is_digit).any():
        return None
    value = np.zeros(len(fields), dtype=np.int64)
    for column in range(fields.shape[1]):
        value = np.where(ended[:, column], value, value * 8 + digits[:, column])
    return value


def _add_up(rows: np.ndarray) -> bool:
    """Whether the sum of each header's bytes, its checksum taken as spaces, is what it says, and its other numbers are some."""
    for start in range(0, len(rows), CHUNK_ROWS):
        part = rows[start : start + CHUNK_ROWS]
        said = _read_octal(part[:, CHECKSUM : CHECKSUM + 8])
        if said is None or any(_read_octal(part[:, begin : begin + width]) is None for begin, width in NUMBERS):
            return False
        others = part.sum(axis=1, dtype=np.int64) - part[:, CHECKSUM : CHECKSUM + 8].sum(axis=1, dtype=np.int64)
        if not np.array_equal(said, others + 8 * ord(" ")):
            return False
    return True


def says_little(records: bytes) -> bool:
    """Whether the records of an extended header are sound, and say nothing of name, size or kind."""
    at = 0
    while at < len(records):
        found = RECORD.match(records, at)
        if found is None or found.end() - at != int(found[1]):
            return False
        at = found.end()
    return True


def _find_firsts(rows: np.ndarray) -> np.ndarray | None:
    """The members that begin a sample, int64; None for names that are not plain, and for a key or a member that may come twice."""
    firsts, keys, extensions, last = [], [], [], None
    for start in range(0, len(rows), CHUNK_ROWS):
        heads = rows[start : start + CHUNK_ROWS]
        names = heads[:, NAME : NAME + NAME_BYTES]
        names = names[:, : 2 + max(np.flatnonzero(names.any(axis=0)), default=0)]  # as far as the longest goes
        if heads[:, PREFIX].any() or names[:, -1].any() or not _are_plain(names):
            return None
        in_key = _find_keys(names)
        key, extension = np.where(in_key, names, 0), np.where(in_key, 0, names)
        firsts.append(np.append(key[0].tobytes().rstrip(b"\0") != last, (key[1:] != key[:-1]).any(axis=1)))
        keys.append(_mix(key))
        extensions.append(_mix(extension))
        last = key[-1].tobytes().rstrip(b"\0")
    is_first, key, extension = map(np.concatenate, (firsts, keys, extensions))
    first = np.flatnonzero(is_first)
    member = np.cumsum(is_first).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    if len(np.unique(key[first])) != len(first) or len(np.unique(member ^ extension)) != len(key):
        return None
    return first


def _are_plain(names: np.ndarray) -> bool:
    after = np.zeros_like(names, dtype=bool)
    after[:, 0] = True
    after[:, 1:] = names[:, :-1] == ord("/")
    ended = np.logical_or.accumulate(names == 0, axis=1)
    return bool(PLAIN[names].all() and BEGINS[names[after]].all() and not (names[ended] != 0).any())


def _find_keys(names: np.ndarray) -> np.ndarray:
    """Which bytes of each name belong to its key: those before the first "." of the file's name."""
    columns = np.arange(names.shape[1])
    slash = np.where(names == ord("/"), columns, -1).max(axis=1)
    dot = np.where((names == ord(".")) & (columns > slash[:, None]), columns, names.shape[1]).min(axis=1)
    in_key: np.ndarray = columns < dot[:, None]
    return in_key


def _mix(texts: np.ndarray) -> np.ndarray:
    """A number (M,) uint64 for each row, whatever zeros end it; two that differ may have the same, rarely."""
    wide = np.zeros((len(texts), -(-texts.shape[1] // 8) * 8), dtype=np.uint8)
    wide[:, : texts.shape[1]] = texts
    value = np.full(len(texts), 0x2545F4914F6CDD1D, dtype=np.uint64)
    for word in wide.view("<u8").T:
        mixed = (value ^ word) * np.uint64(0xD6E8FEB86659FD93)
        value = np.where(word == 0, value, mixed ^ (mixed >> np.uint64(32)))
    return value
