"""Where the samples of a tar begin, from its headers alone, all of them at once.

A header is a block of 512 bytes that says "ustar" at byte 257 (POSIX.1-1988; IEEE Std 1003.1-2017, pax). Blocks that say so are found
by one strided look at the file, their fields are read as columns, and the chain is followed: each member begins where the one before
it ends. What is rare in shards (old headers, long or strange names, links, sizes beyond octal) is left to `shards.read_shard`, which
reads member by member and says what is wrong.
"""

# M members, N samples

from __future__ import annotations

import numpy as np

BLOCK = 512
NAME_BYTES, PREFIX_BYTES = 100, 155
NAME, SIZE, CHECKSUM, KIND, MAGIC, PREFIX = 0, 124, 148, 156, 257, 345  # where a field begins
USTA = int.from_bytes(b"usta", "little")
FILES, EXTENDED = b"0\0", b"x"  # regular files; what pax says of the next one
CHUNK_BLOCKS = 1 << 17  # looked through at once: 64 MiB
OVERRIDES = (b"path=", b"size=")  # what an extended header may say that the next one does not
PLAIN = np.zeros(256, dtype=bool)
PLAIN[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/\0")] = True
BEGINS = PLAIN.copy()
BEGINS[list(b"._-/\0")] = False


def find_samples(content: np.ndarray, *, most_bytes: int, most_members: int) -> np.ndarray | None:
    """The bytes at which each sample of a tar begins, and where the last one ends: (N + 1,) int64; None where it must be read slowly.

    `content` is the whole file, uint8. A sample is a row of members of one key: their name up to the first "." of the file's name.
    What this takes, `shards.read_shard` takes too, and cuts into the same samples.
    """
    count = len(content) // BLOCK
    if count == 0:
        return None
    blocks = content[: count * BLOCK].reshape(count, BLOCK)
    heads = _follow(blocks, _find_heads(blocks))
    if heads is None:
        return None
    at, ends, sizes = heads
    kinds = blocks[at, KIND]
    is_file = (kinds == FILES[0]) | (kinds == FILES[1])
    if len(at) > most_members or not is_file[-1] or (sizes[is_file] > most_bytes).any():
        return None
    extended = np.flatnonzero(~is_file)
    if (
        (kinds[extended] != EXTENDED[0]).any()
        or (np.diff(extended) == 1).any()
        or not _says_little(blocks, at[extended], sizes[extended])
    ):
        return None
    begins = at[is_file].copy()
    begins[np.searchsorted(np.flatnonzero(is_file), extended)] = at[extended]  # a member begins with what is said of it
    first = _find_firsts(blocks, at[is_file])
    return None if first is None else np.append(begins[first], ends[-1]) * BLOCK


def _find_heads(blocks: np.ndarray) -> np.ndarray:
    """The blocks that look like a header, int64."""
    found = []
    for start in range(0, len(blocks), CHUNK_BLOCKS):
        part = blocks[start : start + CHUNK_BLOCKS]
        words = part[:, MAGIC : MAGIC + 4].view("<u4")[:, 0]
        found.append(start + np.flatnonzero((words == USTA) & (part[:, MAGIC + 4] == ord("r"))))
    return np.concatenate(found)


def _follow(blocks: np.ndarray, looks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """The headers on the chain from the first block on, where the member of each ends, in blocks, and its size in bytes.

    None where the chain breaks.
    """
    if len(looks) == 0 or looks[0] != 0:
        return None
    sizes = _read_octal(blocks[looks, SIZE : SIZE + 12])
    if sizes is None:
        return None
    ends = looks + 1 + -(-sizes // BLOCK)
    if not np.array_equal(ends[:-1], looks[1:]):  # a block inside of a member looks like a header, too
        chosen, place = [], 0
        following = np.searchsorted(looks, ends)
        while place < len(looks):
            chosen.append(place)
            after = int(following[place])
            if after < len(looks) and looks[after] != ends[place]:
                break
            place = after
        looks, ends, sizes = looks[chosen], ends[chosen], sizes[chosen]
    end = int(ends[-1])
    if end >= len(blocks) or blocks[end].any() or not _add_up(blocks, looks):
        return None
    return looks, ends, sizes


def _read_octal(fields: np.ndarray) -> np.ndarray | None:
    """Numbers (M,) int64 out of fields (M, width) of octal digits, which a space or a zero ends; None where one is no such number."""
    digits = fields.astype(np.int64) - ord("0")
    is_digit = (digits >= 0) & (digits < 8)
    is_end = (fields == 0) | (fields == ord(" "))
    ended = np.logical_or.accumulate(is_end, axis=1)
    if not (is_digit | ended).all() or (is_end[:, 0]).any() or (is_digit & ended).any():
        return None
    value = np.zeros(len(fields), dtype=np.int64)
    for column in range(fields.shape[1]):
        value = np.where(ended[:, column], value, value * 8 + digits[:, column])
    return value


def _add_up(blocks: np.ndarray, at: np.ndarray) -> bool:
    """Whether the sum of each header's bytes, its checksum taken as spaces, is what it says."""
    for start in range(0, len(at), CHUNK_BLOCKS):
        heads = blocks[at[start : start + CHUNK_BLOCKS]]
        said = _read_octal(heads[:, CHECKSUM : CHECKSUM + 7])
        heads[:, CHECKSUM : CHECKSUM + 8] = ord(" ")
        if said is None or not np.array_equal(said, heads.sum(axis=1, dtype=np.int64)):
            return False
    return True


def _says_little(blocks: np.ndarray, at: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether no extended header gives the next one another name or size."""
    if len(at) == 0:
        return True
    if (sizes > BLOCK).any():
        return False
    for start in range(0, len(at), CHUNK_BLOCKS):
        said = blocks[at[start : start + CHUNK_BLOCKS] + 1].tobytes()
        if any(word in said for word in OVERRIDES):
            return False
    return True


def _find_firsts(blocks: np.ndarray, at: np.ndarray) -> np.ndarray | None:
    """The members that begin a sample, int64; None for names that are not plain, or a key that comes twice."""
    keys, extensions = [], []
    for start in range(0, len(at), CHUNK_BLOCKS):
        heads = blocks[at[start : start + CHUNK_BLOCKS]]
        names = heads[:, NAME : NAME + NAME_BYTES]
        names = names[:, : 2 + max(np.flatnonzero(names.any(axis=0)), default=0)]  # as far as the longest goes
        if heads[:, PREFIX].any() or names[:, -1].any() or not _are_plain(names):
            return None
        key, extension = _split(names)
        keys.append(key)
        extensions.append(extension)
    key, extension = np.concatenate(keys), np.concatenate(extensions)
    is_first = np.append(True, key[1:] != key[:-1])
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


def _split(names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each name a number for its key and one for its extension, (M,) uint64 each."""
    columns = np.arange(names.shape[1])
    slash = np.where(names == ord("/"), columns, -1).max(axis=1)
    dot = np.where((names == ord(".")) & (columns > slash[:, None]), columns, names.shape[1]).min(axis=1)
    in_key = columns < dot[:, None]
    return _mix(np.where(in_key, names, 0)), _mix(np.where(in_key, 0, names))


def _mix(texts: np.ndarray) -> np.ndarray:
    """A number (M,) uint64 for each row, whatever zeros end it: as good as never the same for two that differ."""
    wide = np.zeros((len(texts), -(-texts.shape[1] // 8) * 8), dtype=np.uint8)
    wide[:, : texts.shape[1]] = texts
    value = np.full(len(texts), 0x2545F4914F6CDD1D, dtype=np.uint64)
    for word in wide.view("<u8").T:
        mixed = (value ^ word) * np.uint64(0xD6E8FEB86659FD93)
        value = np.where(word == 0, value, mixed ^ (mixed >> np.uint64(32)))
    return value
