"""Index of a set of tars: the position of each sample, so that one read returns any sample.

Nothing is extracted or decoded in advance. The index is one file. It begins with a line of JSON
that describes the shards (name, size, time of change, inode, digest, number of samples). Then it
has, for each shard, the first byte of each sample and the end of the last one, as int64. The file
is memory-mapped, so that an index of ten million samples opens at once. It is written to the user's
cache; an index next to the shards is used instead if there is one. A shard whose size, time of
change or inode has changed is scanned again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from surefoot.components.data.order import check_ids
from surefoot.components.data.remote.names import check_set
from surefoot.components.data.remote.shards import Remote
from surefoot.components.data.tars.shards import find_starts
from surefoot.contract.digest import digest_of_file
from surefoot.core.errors import DataError

FORMAT = "surefoot tar index 1"
SUFFIX = ".index"
ALIGNED = 64  # bytes: alignment of the positions
MAX_HEAD = 1 << 28
Stamp = tuple[str, int, int, int]
Tell = Callable[[int, int], None]  # called with the bytes done, and all bytes


@dataclass(frozen=True)
class Shard:
    """Entry of a tar in an index.

    `stamp` (name, size, time of change, inode) changes whenever the file is changed. `digest` is
    the SHA-256 of the file.
    """

    name: str
    num_bytes: int
    changed_ns: int
    inode: int
    digest: str
    num_samples: int

    @property
    def stamp(self) -> Stamp:
        return self.name, self.num_bytes, self.changed_ns, self.inode


Known = dict[Stamp, tuple[Shard, np.ndarray]]


class Index:
    """Positions of the samples in the tars of a folder, as the index file `place` contains them.

    Samples are numbered consecutively, from shard to shard, in the order of the shards' names. With
    `remote`, shards are downloaded into `folder`.
    """

    def __init__(
        self,
        folder: Path,
        place: Path,
        shards: Sequence[Shard],
        starts: np.ndarray,
        remote: Remote | None = None,
    ) -> None:
        self.folder, self.place, self.shards = folder, place, tuple(shards)
        self.starts, self._remote = starts, remote
        counts = np.array([shard.num_samples for shard in shards], dtype=np.int64)
        self._ends = np.cumsum(counts)
        text = json.dumps([[shard.name, shard.digest] for shard in shards])
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def open(self, shard: int) -> int:
        """Open a shard for reading, and return its file descriptor.

        Raises OSError, and DataError for a remote shard that cannot be downloaded.
        """
        return (
            os.open(self.folder / self.shards[shard].name, os.O_RDONLY)
            if self._remote is None
            else self._remote.open(shard)
        )

    def most_open(self, allowed: int) -> int:
        """Return the number of shards that may be open at the same time, at most `allowed`."""
        return allowed if self._remote is None else self._remote.most_open(allowed)

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the shard, the first byte and the number of bytes of each sample, each (B,) int64.

        Raises DataError for ids that are out of range, and for a damaged index.
        """
        ids = check_ids(ids, len(self))
        shard = np.searchsorted(self._ends, ids, side="right")
        place = ids + shard  # each earlier shard has one position more than samples
        first = self.starts[place]
        count = self.starts[place + 1] - first
        sizes = np.array(
            [self.shards[number].num_bytes for number in shard.tolist()], dtype=np.int64
        )
        if (first < 0).any() or (count <= 0).any() or (count > sizes - first).any():
            raise DataError(
                f"the index {self.place} is damaged: it has positions outside its tars",
                hint="remove it; the next run builds it again",
            )
        return shard, first, count


def open_index(
    paths: Sequence[Path], cache: Path, *, tell: Tell | None = None, beside: bool = False
) -> Index:
    """Return the index of the tars `paths`; build or update it first if necessary.

    All tars must be in one folder. An up-to-date index next to the tars is used, otherwise the one
    below `cache`. A new index is written below `cache`. With `beside`, the index is only read and
    written next to the tars. `tell` is called with the bytes indexed so far and the bytes to index.

    Raises DataError for a tar that is given twice, tars in several folders, a tar that
    `shards.read_shard` rejects or that changes while it is read, and an index that cannot be
    written.
    """
    ordered = sorted(paths)
    check_set([path.name for path in ordered], {path.parent.resolve() for path in ordered})
    folder = ordered[0].parent
    stamps = [stamp_of(path) for path in ordered]
    name = name_of([path.name for path in ordered])
    places = (
        [folder / name]
        if beside
        else [
            folder / name,
            cache / hashlib.sha256(bytes(folder.resolve())).hexdigest()[:16] / name,
        ]
    )
    known: Known = {}
    for place in places:
        index = read_index(place, folder)
        if index is not None and [shard.stamp for shard in index.shards] == stamps:
            return index
        if index is not None:
            known |= {shard.stamp: (shard, starts) for shard, starts in cut(index)}
    made = _make(ordered, stamps, known, tell)
    try:
        write_index(places[-1], made)
    except OSError as error:
        raise DataError(
            f"the index {places[-1]} cannot be written: {error.strerror}",
            hint="check your permission to write there, and the free disk space",
        ) from error
    return Index(
        folder,
        places[-1],
        [shard for shard, _ in made],
        np.concatenate([starts for _, starts in made]),
    )


def name_of(names: Sequence[str]) -> str:
    """Return the file name of the index for shards with these names, whose order matters."""
    return f"surefoot-{hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:8]}{SUFFIX}"


def stamp_of(path: Path) -> Stamp:
    """Return values that change when a file is changed: name, size, time of change and inode.

    Raises DataError for a path that is missing or not a regular file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", hint="check that the file exists"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file", hint="give tar files")
    return path.name, status.st_size, max(status.st_mtime_ns, status.st_ctime_ns), status.st_ino


def _make(
    paths: Sequence[Path], stamps: Sequence[Stamp], known: Known, tell: Tell | None
) -> list[tuple[Shard, np.ndarray]]:
    """Return the index entry of each tar, and the positions of its samples.

    Tars whose stamp is not in `known` are scanned, several in parallel.
    """
    missing = [
        (path, stamp) for path, stamp in zip(paths, stamps, strict=True) if stamp not in known
    ]
    total, done = sum(stamp[1] for _, stamp in missing), 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(_scan, path, stamp) for path, stamp in missing]
        try:
            for future, (_, stamp) in zip(futures, missing, strict=True):
                known[stamp] = future.result()
                done += stamp[1]
                if tell is not None:
                    tell(done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [known[stamp] for stamp in stamps]


def _scan(path: Path, stamp: Stamp) -> tuple[Shard, np.ndarray]:
    name, num_bytes, changed_ns, inode = stamp
    digest, starts = scan_shard(path)
    if stamp_of(path) != stamp:
        raise DataError(f"{path} changed while it was read", hint="wait until it is complete")
    return Shard(name, num_bytes, changed_ns, inode, digest, len(starts) - 1), starts


def scan_shard(path: Path) -> tuple[str, np.ndarray]:
    """Return the SHA-256 of a tar, and the positions that `find_starts` returns.

    Raises DataError for a tar that `shards.read_shard` rejects.
    """
    return digest_of(path), find_starts(path)  # the headers are in the page cache now


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits, as `sha256sum` prints it.

    Raises DataError for a file that cannot be read.
    """
    try:
        return digest_of_file(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            hint="check that the file exists and that you have permission to read it",
        ) from None


def read_index(place: Path, folder: Path, remote: Remote | None = None) -> Index | None:
    """Return the index in the file `place`; None if the file is missing, incomplete or invalid.

    `folder` contains the tars of the index.
    """
    try:
        with place.open("rb") as file:
            row = json.loads(file.readline(MAX_HEAD))
            begin = -(-file.tell() // ALIGNED) * ALIGNED
        shards = [Shard(**each) for each in row["shards"]] if row["format"] == FORMAT else []
        count = sum(shard.num_samples + 1 for shard in shards)
        if not all(
            isinstance(shard.name, str) and isinstance(shard.digest, str) for shard in shards
        ):
            return None
        if not shards or place.stat().st_size != begin + 8 * count:
            return None
        starts = np.memmap(place, dtype="<i8", mode="r", offset=begin, shape=(count,))
        return Index(folder, place, shards, starts, remote)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def cut(index: Index) -> Iterator[tuple[Shard, np.ndarray]]:
    """Yield the entry of each shard of an index, and the positions of its samples."""
    ends = np.cumsum([shard.num_samples + 1 for shard in index.shards])
    yield from zip(index.shards, np.split(np.asarray(index.starts), ends[:-1]), strict=True)


def write_index(place: Path, made: Sequence[tuple[Shard, np.ndarray]]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    head = (
        json.dumps({"format": FORMAT, "shards": [asdict(shard) for shard, _ in made]}).encode()
        + b"\n"
    )
    # not made by tempfile: the mode follows the umask
    draft = place.with_name(f".draft-{uuid.uuid4().hex}")
    with draft.open("xb") as file:
        try:
            file.write(head + bytes(-len(head) % ALIGNED))
            for _, starts in made:
                file.write(np.ascontiguousarray(starts, dtype="<i8").data)
            file.flush()
            os.fsync(file.fileno())
            draft.replace(place)
        except BaseException:
            draft.unlink()
            raise
