"""Set of remote shards, each downloaded completely and verified when it is requested.

The shards that will be read next are downloaded in advance.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast, final

from surefoot.components.data.remote.cache import Cache
from surefoot.components.data.remote.fetch import Far, RetryPolicy, Stream
from surefoot.components.data.remote.names import ShardUrl, find_places
from surefoot.core.errors import DataError, SurefootError
from surefoot.core.place import cache_folder, whole_path
from surefoot.core.process.forked import make_lock
from surefoot.core.units import parse_bytes

SUMS = "SHA256SUMS"
SUM_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(\S+)\s*")
DIGEST = re.compile(r"[0-9a-f]{64}\Z")


@final
class Remote:
    """Set of remote shards by URL, which `Tars` accepts in place of paths.

    Example: `Remote("s3://bucket/train-{000..099}.tar", cache_bytes="20 GiB")`.

    Args:
        urls: One URL or several; patterns such as {000..099} and {a,b} are expanded.
        cache: Folder of the downloaded shards (default: $XDG_CACHE_HOME/surefoot/remote).
        cache_bytes: Maximum total size of the downloaded shards, as a number or a text such as "20
            GiB".
        ahead: Number of following shards that are downloaded in advance.
        digests: SHA-256 (hex) of shards, by name; by default, those in a file SHA256SUMS next to
            the shards. A shard without such a digest is verified against the digest in the index
            next to the shards, or if there is none, against that of its first download.
        patience: Retry settings of each request; None for `RetryPolicy()`.

    Raises:
        DataError: For URLs that are not supported, invalid digests, and sizes out of bounds.
    """

    _lock: threading.Lock

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        cache: str | Path | None = None,
        cache_bytes: str | int = "20 GiB",
        ahead: int = 2,
        digests: Mapping[str, str] | None = None,
        patience: RetryPolicy | None = None,
    ) -> None:
        self.places = find_places(urls)
        self.ahead, self._patience = ahead, patience or RetryPolicy()
        most_bytes = parse_bytes(cache_bytes) if isinstance(cache_bytes, str) else cache_bytes
        if ahead < 0 or most_bytes < 1:
            raise DataError(
                f"a cache of {cache_bytes} with {ahead} shards ahead is not possible",
                hint='give cache_bytes="20 GiB" and ahead=2, or 0',
            )
        self.cache = Cache(whole_path(cache) if cache else cache_folder() / "remote", most_bytes)
        where = self.places[0].shown.rpartition("/")[0]
        self.folder = self.cache.folder / hashlib.sha256(where.encode()).hexdigest()[:16]
        self.where = where
        self.listed = self._read_digests(digests)
        self._known: dict[int, tuple[int, str]] = {}
        # the shards that follow each, where `expect` gave an order
        self._after: dict[int, list[int]] | None = None
        self._last = -1
        self._sound: dict[int, int] = {}  # inode of each copy that this process has verified
        self._coming: deque[int] = deque()
        self._thread: threading.Thread | None = None
        make_lock(self)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def names(self) -> list[str]:
        return [place.name for place in self.places]

    def path(self, number: int) -> Path:
        """Return the path of a shard in the cache. The file exists only while it is cached."""
        return self.folder / self.places[number].name

    def know(self, sizes: Sequence[int], digests: Sequence[str]) -> None:
        """Set the expected size and digest of every shard, as an index contains them.

        Shards that are downloaded later must match.
        """
        self._known = dict(enumerate(zip(sizes, digests, strict=True)))

    def size(self, number: int) -> int:
        """Return the size of a shard in bytes, from the index or else from the server."""
        return (
            self._known[number][0]
            if number in self._known
            else Far(self.places[number], self._patience).size()
        )

    def most_open(self, allowed: int) -> int:
        """Return the number of shards that one reader may keep open, at most `allowed`.

        They take at most a quarter of the cache (but are at least one), to leave space for
        downloads and other readers.
        """
        largest = max((size for size, _ in self._known.values()), default=self.cache.most_bytes)
        return max(1, min(allowed, self.cache.most_bytes // (4 * max(1, largest))))

    def open(self, number: int) -> int:
        """Return a file descriptor of a shard, which is downloaded first if necessary.

        While the descriptor is open, the shard stays in the cache. Raises DataError for a shard
        that cannot be downloaded, or whose digest is wrong in two consecutive downloads.
        """
        descriptor = self._open(number)
        self._prefetch(number)
        return descriptor

    def expect(self, order: Sequence[int]) -> None:
        """Set the order in which the shards will be read.

        When a shard is read, the next `ahead` shards of this order are downloaded in advance.
        """
        self._after = {
            number: list(order[place + 1 : place + 1 + self.ahead])
            for place, number in enumerate(order)
        }
        self._fetch_ahead(list(order[: self.ahead]))

    def stream(self, number: int) -> BinaryIO:
        """Return a file object that reads a shard sequentially, without a copy on disk.

        At the end of the shard, reading raises DataError if the digest does not match.
        """
        return cast(BinaryIO, io.BufferedReader(Stream(self._checked_pieces(number)), 1 << 20))

    def read_beside(self, name: str) -> bytes | None:
        """Return the content of a small file in the folder of the shards; None if it is missing."""
        return Far(self.places[0].sibling_url(name), self._patience).read_small()

    def digest(self, number: int) -> str | None:
        """Return the SHA-256 that a shard must have; None if it is not known yet."""
        return self.listed.get(self.places[number].name) or (
            self._known[number][1] if number in self._known else None
        )

    def _read_digests(self, given: Mapping[str, str] | None) -> dict[str, str]:
        """Return the expected digests: `given`, or if that is None those in the file SHA256SUMS.

        Raises DataError for an invalid digest, and for one whose name is not that of a shard.
        """
        if given is None:
            return parse_sums(self.read_beside(SUMS) or b"")
        bad = next(
            (name for name, digest in given.items() if not DIGEST.match(str(digest).lower())), None
        )
        unknown = next((name for name in given if name not in set(self.names)), None)
        if bad is not None or unknown is not None:
            raise DataError(
                f"digests has the entry {unknown}, which is not a shard"
                if bad is None
                else f"the digest of {bad} is {given[bad]!r}",
                hint="give {name of the shard: its SHA-256 in 64 hex digits}",
            )
        return {name: digest.lower() for name, digest in given.items()}

    def _open(self, number: int, **how: float) -> int:
        size, wanted = self.size(number), self.digest(number)
        while True:
            descriptor = self.cache.open(
                self.path(number), size, lambda file: self._fill(file, number, size), **how
            )
            inode = os.fstat(descriptor).st_ino
            if (
                wanted is None
                or self._sound.get(number) == inode
                or _digest_of(descriptor) == wanted
            ):
                self._sound[number] = inode
                return descriptor
            # the copy in the cache is damaged or another version: it is downloaded again, once
            os.close(descriptor)
            self.cache.discard(self.path(number))

    def _fill(self, file: BinaryIO, number: int, size: int) -> None:
        """Download a shard into `file`; if the digest does not match, download it once more.

        Raises DataError if the digest does not match again.
        """
        wanted, found = self.digest(number), ""
        for _ in range(2):
            file.seek(0)
            digest = hashlib.sha256()
            for piece in Far(self.places[number], self._patience).pieces(size):
                file.write(piece)
                digest.update(piece)
            found = digest.hexdigest()
            if wanted in (None, found):
                self._sound[number] = os.fstat(file.fileno()).st_ino
                return
        raise _another(self.places[number], found, wanted)

    def _checked_pieces(self, number: int) -> Iterator[bytes]:
        wanted, digest = self.digest(number), hashlib.sha256()
        for piece in Far(self.places[number], self._patience).pieces(self.size(number)):
            digest.update(piece)
            yield piece
        if wanted not in (None, digest.hexdigest()):
            raise _another(self.places[number], digest.hexdigest(), wanted)

    def _prefetch(self, number: int) -> None:
        """Start to download the shards that follow a shard.

        The next shards are known if `expect` has set an order, or if the shards are read in
        sequence; otherwise, nothing is downloaded.
        """
        if self._after is not None:
            self._fetch_ahead(self._after.get(number, []))
        elif number == self._last + 1:
            self._fetch_ahead(list(range(number + 1, min(number + 1 + self.ahead, len(self)))))
        self._last = number

    def _fetch_ahead(self, numbers: Sequence[int]) -> None:
        with self._lock:
            self._coming = deque(numbers)
            if numbers and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, name="shards ahead", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._coming:
                    self._thread = None
                    return
                number = self._coming.popleft()
            with suppress(SurefootError):  # the reader of the shard tries again, and gets the error
                os.close(self._open(number, wait_s=0.0))

    def __getstate__(self) -> dict[str, Any]:  # another process downloads in advance by itself
        return {**self.__dict__, "_thread": None, "_lock": None, "_coming": deque()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        make_lock(self)


def parse_sums(content: bytes) -> dict[str, str]:
    """Return the digests in a list that `sha256sum` wrote, by file name.

    Lines in other formats are ignored.
    """
    found = map(SUM_LINE.fullmatch, content.decode("utf-8", "replace").splitlines())
    return {line[2]: line[1].lower() for line in found if line is not None}


def _digest_of(descriptor: int) -> str:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _another(place: ShardUrl, found: str, wanted: str | None) -> DataError:
    return DataError(
        f"{place.shown} has the SHA-256 {found}, but {wanted} was expected",
        hint=(
            "if the shard was written again, give its new digest, or remove the index "
            "from the cache"
        ),
    )
