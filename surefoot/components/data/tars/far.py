"""Index of remote tars: downloaded from their folder if it is there, otherwise built once.

To build the index, every shard is downloaded. The index contains the digest of each shard, with
which each later download is compared. A remote shard is identified by its digest, because the file
times of its copy in the cache change with each download.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from surefoot.components.data.remote.cache import file_lock
from surefoot.components.data.remote.names import is_url
from surefoot.components.data.remote.shards import Remote
from surefoot.components.data.tars.index import (
    Index,
    Shard,
    Tell,
    cut,
    name_of,
    read_index,
    scan_shard,
    write_index,
)
from surefoot.core.errors import DataError, hint_unwritten

Made = list[tuple[Shard, np.ndarray]]


def find_remote(
    paths: Remote | str | Path | Sequence[str | Path], cache: str | Path | None = None
) -> Remote | None:
    """Return the remote shards that `paths` name; None if the paths are local files.

    `cache` is the folder of downloaded shards. Raises DataError if some paths are URLs and some are
    files.
    """
    if isinstance(paths, Remote):
        return paths
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    urls = [path for path in named if isinstance(path, str) and is_url(path)]
    if not urls:
        return None
    if len(urls) != len(named):
        raise DataError(
            "some shards are URLs and some are files", hint="pass only URLs, or only files"
        )
    return Remote(urls, cache=cache)


def open_remote(remote: Remote, *, tell: Tell | None = None) -> Index:
    """Return the index of remote tars; build it first if necessary.

    After this call, each downloaded shard must have its digest in the index. Raises DataError for a
    shard that `shards.read_shard` rejects, that cannot be downloaded, or that differs from its
    listed digest.
    """
    place = remote.folder / name_of(remote.names)
    try:
        remote.folder.mkdir(parents=True, exist_ok=True)
        with file_lock(remote.folder / ".index-lock"):  # of several processes, one builds it
            index = _index_if_usable(
                read_index(place, remote.folder, remote), remote
            ) or _read_index_beside(remote, place)
            if index is None:
                write_index(place, _make(remote, place, tell))
                index = read_index(place, remote.folder, remote)
    except OSError as error:
        raise DataError(
            f"the index {place} cannot be written: {error.strerror}",
            hint=hint_unwritten(error, "give another cache"),
        ) from error
    if index is None:
        raise DataError(f"the index {place} cannot be read back", hint="check the disk")
    remote.know(
        [shard.num_bytes for shard in index.shards], [shard.digest for shard in index.shards]
    )
    return index


def open_each(remote: Remote) -> Iterator[Path]:
    """Yield the local path of each remote shard, one after another.

    A shard is downloaded if necessary. It stays in the cache until the next path is requested.
    """
    for number in range(len(remote)):
        descriptor = remote.open(number)
        try:
            yield remote.path(number)
        finally:
            os.close(descriptor)


def _index_if_usable(index: Index | None, remote: Remote) -> Index | None:
    """Return the index if it describes the shards of `remote`, otherwise None.

    The shards must have the same names. If `remote` lists a digest of a shard, the digest in the
    index must equal it.
    """
    if index is None or [shard.name for shard in index.shards] != remote.names:
        return None
    is_listed = all(
        remote.listed.get(shard.name, shard.digest) == shard.digest for shard in index.shards
    )
    return index if is_listed else None


def _read_index_beside(remote: Remote, place: Path) -> Index | None:
    content = remote.read_beside(place.name)
    if content is None:
        return None
    # not made by tempfile: the mode follows the umask
    draft = place.with_name(f".draft-{uuid.uuid4().hex}{place.suffix}")
    draft.write_bytes(content)
    try:
        if _index_if_usable(read_index(draft, remote.folder), remote) is None:
            return None
        draft.rename(place)
    finally:
        draft.unlink(missing_ok=True)
    return read_index(place, remote.folder, remote)


def _make(remote: Remote, place: Path, tell: Tell | None) -> Made:
    """Return the index entry of each remote shard, and the positions of its samples.

    They are taken from an earlier index if it has the listed digest of the shard. All other shards
    are downloaded and scanned.
    """
    old = read_index(place, remote.folder)
    known = {
        (shard.name, shard.digest): (shard, starts)
        for shard, starts in (() if old is None else cut(old))
    }
    made: Made = []
    for number, name in enumerate(remote.names):
        found = known.get((name, remote.listed.get(name, "")))
        if found is None:
            descriptor = remote.open(number)
            try:
                digest, starts = scan_shard(remote.path(number))
                found = (
                    Shard(name, os.fstat(descriptor).st_size, 0, 0, digest, len(starts) - 1),
                    starts,
                )
            finally:
                os.close(descriptor)
        made.append(found)
        if tell is not None:
            tell(number + 1, len(remote))
    return made
