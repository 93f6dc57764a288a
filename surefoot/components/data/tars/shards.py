"""Tar shards in the WebDataset layout, where consecutive members `key.ext` form one sample.

Shards are streamed, never extracted, and checked completely. A tar is untrusted input: only regular
files with plain names are read, sizes and counts are limited before memory is allocated, and
contents are decoded only by the functions in `decoders.py`. The layout is that of A. Aizman et al.,
"High Performance I/O For Large Scale Deep Learning", 2019
(https://github.com/webdataset/webdataset).
"""

# N samples

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self, cast

import numpy as np

from surefoot.core.errors import DataError

MAX_MEMBER_BYTES = 64 << 20
MAX_MEMBERS = 10_000_000
BLOCK = tarfile.BLOCKSIZE
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


@dataclass(frozen=True)
class Sample:
    """Sample of a tar: the members of `shard` that are named `key.extension`.

    `parts` maps each extension to the bytes of the member.
    """

    shard: Path
    key: str
    parts: dict[str, bytes] = field(default_factory=dict)

    def fault(self, extension: str, reason: str, hint: str | None = None) -> DataError:
        """Return a DataError that names the shard, the member and the reason."""
        return DataError(f"{self.shard}: {self.key}.{extension} {reason}", hint=hint)


def find_shards(folder: str | Path | None, pattern: str, *, home: str) -> list[Path]:
    """Return the shards of a data set whose names match the glob `pattern`, sorted by name.

    They are searched for in `folder`, then in its subfolder `home`. Raises DataError if the folder
    is None, missing or unreadable, or if no shard is found.
    """
    hint = f"give the folder of the {pattern} files, or its parent, with --data DIR"
    if folder is None:
        raise DataError(f"the folder of the shards ({home}) is not given", hint=hint)
    given = Path(folder).expanduser()
    try:
        if not given.is_dir():
            raise DataError(
                f"{given} is {'not a folder' if given.exists() else 'missing'}", hint=hint
            )
        for place in (given, given / home):
            found = (
                sorted(path for path in place.iterdir() if path.match(pattern))
                if place.is_dir()
                else []
            )
            if found:
                return found
    except OSError as error:
        raise DataError(
            f"{given} cannot be read: {error.strerror}", hint="check your permission to read it"
        ) from None
    raise DataError(
        f"{given} contains no {pattern}, and neither does its subfolder {home}", hint=hint
    )


def read_shard(
    path: Path, *, needs: Sequence[str] = (), max_member_bytes: int = MAX_MEMBER_BYTES
) -> Iterator[Sample]:
    """Yield the samples of an uncompressed tar, in the order of the file.

    Raises DataError, with file, member and reason:

    - for a file that is not a tar, is truncated or damaged;
    - for a member that is not a regular file, has no plain name, or is larger than
      `max_member_bytes`;
    - for a sample that occurs twice or lacks one of the extensions `needs`.
    """
    for sample, _, _ in read_spans(path, max_member_bytes=max_member_bytes):
        yield complete(sample, needs)


def find_starts(path: Path, *, max_member_bytes: int = MAX_MEMBER_BYTES) -> np.ndarray:
    """Return the first byte of each sample of a tar, and the end of the last: (N + 1,) int64.

    Only the headers are read. Raises the same errors as `read_shard`.
    """
    spans = [
        (start, stop)
        for _, start, stop in read_spans(path, max_member_bytes=max_member_bytes, headers_only=True)
    ]
    return np.array([start for start, _ in spans] + [spans[-1][1]], dtype=np.int64)


def read_spans(
    path: Path,
    *,
    max_member_bytes: int = MAX_MEMBER_BYTES,
    file: BinaryIO | None = None,
    headers_only: bool = False,
) -> Iterator[tuple[Sample, int, int]]:
    """Yield each sample of a tar, with its first byte and the byte after its end.

    A sample need not have particular members. With `file`, this stream is read sequentially to its
    end and closed; `path` is then only its name in error messages. With `headers_only`, the
    contents of the members are empty. Raises the same errors as `read_shard`.
    """
    seen: set[str] = set()
    sample: Sample | None = None
    start = end = 0
    for name, content, first, last in _members(path, max_member_bytes, file, headers_only):
        key, extension = split_name(name)
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample, start, end
            if key in seen:
                raise DataError(
                    f"{path}: {name} belongs to {key}, whose members are not consecutive",
                    hint="write the members of each sample one after another",
                )
            seen.add(key)
            sample, start = Sample(path, key), first
        if extension in sample.parts:
            raise sample.fault(extension, "occurs twice")
        sample.parts[extension] = content
        end = last
    if sample is None:
        raise DataError(
            f"{path} contains no sample",
            hint="its members should be named like 000123.jpg and 000123.cls",
        )
    yield sample, start, end


def split_name(name: str) -> tuple[str, str]:
    """Split the name of a member into key and extension, at the first dot of the file name.

    >>> split_name("a.b/1.seg.png")
    ('a.b/1', 'seg.png')
    """
    dot = name.find(".", name.rfind("/") + 1)
    return (name[:dot], name[dot + 1 :]) if dot >= 0 else (name, "")


def is_plain(name: str) -> bool:
    """Return whether each component of a member's path is a plain name.

    A plain name consists of letters, digits, '.', '_' and '-', and begins with a letter or a digit.
    """
    return all(NAME.match(part) for part in name.split("/"))


def complete(sample: Sample, needs: Sequence[str]) -> Sample:
    """Return the sample, after checking that it has a member for each extension in `needs`.

    Raises DataError for a missing member.
    """
    for extension in needs:
        if extension not in sample.parts:
            raise sample.fault(
                extension, f"is missing; the sample has {', '.join(sorted(sample.parts))}"
            )
    return sample


class _Stream:
    """Sequential file for tarfile that buffers the last bytes read.

    The buffer makes it possible to seek back to the end marker of the tar.
    """

    KEPT = 4 * tarfile.RECORDSIZE  # tarfile reads a record at a time

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._kept, self._at, self._seen = file, b"", 0, 0

    def read(self, size: int) -> bytes:
        if self._at < self._seen:
            first = self._at - self._seen + len(self._kept)
            found = self._kept[first : first + size] if first >= 0 else b""
        else:
            found = self._file.read(size) or b""
            self._kept = (self._kept + found)[-self.KEPT :]
            self._seen += len(found)
        self._at += len(found)
        return found

    def seek(self, to: int) -> None:
        self._at = to

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()


def _members(
    path: Path, max_member_bytes: int, stream: BinaryIO | None, headers_only: bool
) -> Iterator[tuple[str, bytes, int, int]]:
    """Yield the name, content, first byte and end of each member of a tar.

    The end marker of the tar is checked, because tarfile stops silently at a truncated or damaged
    header.
    """
    end = 0
    try:
        with (
            path.open("rb") if stream is None else _Stream(stream) as file,
            tarfile.open(
                fileobj=cast(BinaryIO, file), mode="r:" if stream is None else "r|"
            ) as archive,
        ):
            for number, member in enumerate(archive):
                archive.members = []  # type: ignore[attr-defined] # tarfile would keep them all
                _check(path, member, number, max_member_bytes)
                opened = None if headers_only else archive.extractfile(member)
                content = opened.read() if opened is not None else b""
                if opened is not None and len(content) != member.size:
                    raise DataError(
                        f"{path}: {member.name} is truncated at {len(content)} of {member.size} "
                        "bytes",
                        hint="copy the shard again",
                    )
                end = member.offset_data + -(-member.size // BLOCK) * BLOCK
                yield member.name, content, member.offset, end
            file.seek(end)
            marker = file.read(BLOCK)
            while stream is not None and file.read(1 << 16):
                pass  # to its end: the writer is not interrupted, and a digest covers all bytes
    # the last two are tarfile's errors for malformed headers
    except (tarfile.TarError, ValueError, OverflowError) as error:
        what = f"is damaged after byte {end}" if end else "is not a tar"
        raise DataError(
            f"{path} {what}: {error}",
            hint="shards are plain tars, not compressed; copy the file again",
        ) from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}",
            hint="check that the file exists, and your permission to read it",
        ) from None
    if marker.count(0) != BLOCK:
        what = (
            "is truncated: it has no end marker"
            if len(marker) < BLOCK
            else "is damaged: no member begins"
        )
        raise DataError(f"{path} {what} at byte {end}", hint="copy the shard again")


def _check(path: Path, member: tarfile.TarInfo, number: int, max_member_bytes: int) -> None:
    shown = member.name[:128]
    if number >= MAX_MEMBERS:
        raise DataError(
            f"{path} has more than {MAX_MEMBERS:,} members", hint="split it into several shards"
        )
    if not member.isreg() or member.issparse():
        raise DataError(
            f"{path}: {shown!r} is not a regular file",
            hint="a shard has regular files only: no folders, links, devices or sparse files",
        )
    if not is_plain(member.name):
        raise DataError(
            f"{path}: {shown!r} is not a plain name",
            hint="use letters, digits, '.', '_' and '-', in a relative path without '..'",
        )
    if not 0 <= member.size <= max_member_bytes:
        raise DataError(
            f"{path}: {shown} has {member.size:,} bytes, "
            f"and at most {max_member_bytes:,} are allowed",
            hint="check that it belongs to a sample; store larger files outside the shard",
        )
