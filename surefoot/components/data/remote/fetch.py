"""Download of a remote file in pieces; after a failure, it resumes at the piece that failed.

Each piece is a separate range request. A server that does not support ranges sends the whole file
each time, from which the missing piece is taken. The waits between tries double, and are random
(equal jitter: M. Brooker, "Exponential Backoff And Jitter", 2015), so that many readers do not
retry at the same time. A permanent error (4xx, no permission, not found) is raised at once.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from surefoot.components.data.remote.names import EXTRA, ShardUrl
from surefoot.core.errors import DataError, MissingExtra, SurefootError, require_package
from surefoot.core.units import format_bytes

PIECE_BYTES = 8 << 20
MAX_SIDE_FILE_BYTES = 1 << 28  # of a list of digests, or of an index
AGAIN = (408, 425, 429)  # HTTP 4xx statuses that a retry may resolve
T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """Retry settings of a request to a server.

    A request is for 8 MiB of a shard, or for the whole shard if the server does not support ranges.

    Args:
        tries: Maximum number of tries.
        first_wait_s: Longest wait before the second try, in seconds; it doubles with each further
            try.
        longest_wait_s: Upper limit of a wait, in seconds.
        request_s: Timeout of each try, in seconds.
    """

    tries: int = 6
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    request_s: float = 60.0


class Far:
    """Remote file.

    Its methods raise DataError if it cannot be read, and MissingExtra if a package is not
    installed.
    """

    def __init__(self, place: ShardUrl, patience: RetryPolicy) -> None:
        self.place, self._patience = place, patience

    def size(self) -> int:
        """Return the size in bytes that the server reports. Raises DataError if it is unknown."""

        def ask(system: Any, path: str) -> int | None:
            system.invalidate_cache()
            size: int | None = system.info(path, timeout=self._patience.request_s)["size"]
            return size

        size = self._retry(ask)
        if size is None:
            raise DataError(
                f"{self.place.shown}: the server does not send Content-Length",
                hint="serve it as a file, with Content-Length",
            )
        return size

    def pieces(self, size: int) -> Iterator[bytes]:
        """Yield the file, which has `size` bytes, in consecutive pieces."""
        at = 0
        while at < size:
            piece = self._piece(at, min(at + PIECE_BYTES, size), size)
            at += len(piece)
            yield piece

    def read_small(self) -> bytes | None:
        """Return the content of a small file; None if it is absent or access is denied."""
        try:
            size = self.size()
        # without permission to list, a store answers 403 for a missing file
        except DataError as error:
            if error.__cause__ is not None and _is_absent(error.__cause__):
                return None
            raise
        if size > MAX_SIDE_FILE_BYTES:
            raise DataError(
                f"{self.place.shown} has {format_bytes(size)}, "
                f"{format_bytes(MAX_SIDE_FILE_BYTES)} are allowed",
                hint="check that the URL is that of an index or of SHA256SUMS",
            )
        return b"".join(self.pieces(size))

    def _piece(self, start: int, stop: int, size: int) -> bytes:
        def ask(system: Any, path: str) -> bytes:
            piece: bytes = system.cat_file(
                path, start=start, end=stop, timeout=self._patience.request_s
            )
            return piece

        piece = self._retry(ask, (stop - start, size - start, size))
        # the whole file: the server does not support ranges
        return piece[start:] if len(piece) == size else piece

    def _retry(self, ask: Callable[[Any, str], T], lengths: Sequence[int] = ()) -> T:
        """Return `ask(file system, path)`, with new tries after transient errors.

        If `lengths` is given, a result of any other length also causes a new try. Raises DataError
        if all tries fail, and at once for a permanent error.
        """
        with require_package(
            "tenacity", "tenacity", extra=EXTRA, needed_for=f"reading {self.place.shown}"
        ):
            import tenacity
        patience = self._patience
        waits = patience.first_wait_s / 2, patience.longest_wait_s / 2
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(patience.tries),
            wait=tenacity.wait_exponential(*waits) + tenacity.wait_random_exponential(*waits),
            retry=tenacity.retry_if_exception(_is_mendable)
            | tenacity.retry_if_result(lambda result: bool(lengths) and len(result) not in lengths),
            reraise=True,
        )
        try:
            return retrying(lambda: ask(*self._open()))
        except SurefootError:
            raise
        except Exception as error:
            reason, hint = self._words(error), "check the URL, and your permission to read it"
            if isinstance(error, tenacity.RetryError):
                reason = f"sent {len(error.last_attempt.result()):,} bytes of {lengths[0]:,}"
            if _is_mendable(error):
                waited_s = retrying.statistics["delay_since_first_attempt"]
                reason = f"{patience.tries} tries in {waited_s:.0f} s ended with: {reason}"
                hint = "start again when the server responds; the files in the cache are kept"
            raise DataError(f"{self.place.shown} cannot be fetched: {reason}", hint=hint) from error

    def _open(self) -> tuple[Any, str]:
        """Return the fsspec file system of the URL, and the path of the file in it.

        fsspec caches file systems per process.
        """
        what = f"reading {self.place.shown}"
        with require_package("fsspec", "fsspec", extra=EXTRA, needed_for=what):
            import fsspec
        try:
            system, path = fsspec.core.url_to_fs(self.place.url)
        # fsspec's error for a package of a backend that is missing or broken
        except ImportError as error:
            if not isinstance(error.__cause__, ModuleNotFoundError):
                raise
            raise MissingExtra(str(error.__cause__.name), extra=EXTRA, needed_for=what) from None
        return system, path

    def _words(self, error: BaseException) -> str:
        status = _status(error)
        words = f"{type(error).__name__}: {error}".replace(self.place.url, self.place.shown)
        query = self.place.url.partition("?")[2]
        words = words.replace(query, "...") if query else words
        return f"HTTP {status}, {words}"[:300] if status else words[:300]


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error or of one of its causes; None if there is none."""
    for each in _causes(error):
        status = getattr(each, "status", None)
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int) and status:
            return status
    return None


def _is_mendable(error: BaseException) -> bool:
    """Return whether a new try may succeed after this error.

    It cannot succeed after most HTTP statuses 4xx, a missing file or permission, or an error of
    surefoot.
    """
    status, last = _status(error), list(_causes(error))[-1]
    if isinstance(error, SurefootError) or not isinstance(error, Exception):
        return False
    if status is not None:
        return not 400 <= status < 500 or status in AGAIN
    return (
        not isinstance(last, FileNotFoundError | PermissionError)
        and "Credentials" not in type(last).__name__
    )


def _is_absent(error: BaseException) -> bool:
    status = _status(error)
    return status in (403, 404) or (
        status is None and isinstance(list(_causes(error))[-1], FileNotFoundError)
    )


class Stream(io.RawIOBase):
    """File object that reads a remote file sequentially, without a copy on disk."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._left = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count
