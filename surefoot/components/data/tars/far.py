"""The index of remote tars: taken from beside them where it lies there, else made once, by fetching every shard in turn.

It holds the digest of every shard, so that each later fetch is held against the first. A shard is told by its digest here: what the
local file system says of a copy in the cache changes each time it is fetched.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from surefoot.components.data.remote import Remote, is_url
from surefoot.components.data.remote.cache import locked
from surefoot.components.data.tars.index import Index, Shard, Tell, cut, look_through, name_of, read_index, write_index
from surefoot.core.errors import DataError, hint_unwritten

Made = list[tuple[Shard, np.ndarray]]


def find_remote(paths: Remote | str | Path | Sequence[str | Path], cache: str | Path | None = None) -> Remote | None:
    """The remote shards that are meant; None for local files. Raises DataError for some of each."""
    if isinstance(paths, Remote):
        return paths
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    urls = [path for path in named if isinstance(path, str) and is_url(path)]
    if not urls:
        return None
    if len(urls) != len(named):
        raise DataError("some shards are URLs and some are files", hint="give the shards of one place")
    return Remote(urls, cache=cache)


def open_remote(remote: Remote, *, tell: Tell | None = None) -> Index:
    """The index of remote tars, made first where it has to be; from then on each shard must have the digest that it says.

    Raises DataError for what `shards.read_shard` refuses, and for a shard that cannot be had or does not have its listed digest.
    """
    place = remote.folder / name_of(remote.names)
    try:
        remote.folder.mkdir(parents=True, exist_ok=True)
        with locked(remote.folder / ".index-lock"):  # several processes begin together: one makes it
            index = _usable(read_index(place, remote.folder, remote), remote) or _from_beside(remote, place)
            if index is None:
                write_index(place, _make(remote, place, tell))
                index = read_index(place, remote.folder, remote)
    except OSError as error:
        raise DataError(
            f"the index {place} cannot be written: {error.strerror}", hint=hint_unwritten(error, "give another cache")
        ) from error
    if index is None:
        raise DataError(f"the index {place} is not what was written", hint="is the disk sound?")
    remote.know([shard.num_bytes for shard in index.shards], [shard.digest for shard in index.shards])
    return index


def open_each(remote: Remote) -> Iterator[Path]:
    """Each shard in turn, in the cache and in use until the next is asked for."""
    for number in range(len(remote)):
        descriptor = remote.open(number)
        try:
            yield remote.path(number)
        finally:
            os.close(descriptor)


def _usable(index: Index | None, remote: Remote) -> Index | None:
    """The index, if it is of these shards and says nothing else than the listed digests."""
    if index is None or [shard.name for shard in index.shards] != remote.names:
        return None
    is_listed = all(remote.listed.get(shard.name, shard.digest) == shard.digest for shard in index.shards)
    return index if is_listed else None


def _from_beside(remote: Remote, place: Path) -> Index | None:
    content = remote.read_beside(place.name)
    if content is None:
        return None
    draft = place.with_name(f".draft-{uuid.uuid4().hex}{place.suffix}")  # unlike one of tempfile, with a mode by the umask
    draft.write_bytes(content)
    try:
        if _usable(read_index(draft, remote.folder), remote) is None:
            return None
        draft.rename(place)
    finally:
        draft.unlink(missing_ok=True)
    return read_index(place, remote.folder, remote)


def _make(remote: Remote, place: Path, tell: Tell | None) -> Made:
    """What is known of each shard, or else what is found by looking through it."""
    old = read_index(place, remote.folder)
    known = (
        {}
        if old is None
        else {(shard.name, shard.digest): (shard, starts) for shard, starts in zip(old.shards, cut(old), strict=True)}
    )
    made: Made = []
    for number, name in enumerate(remote.names):
        found = known.get((name, remote.listed.get(name, "")))
        if found is None:
            descriptor = remote.open(number)
            try:
                digest, starts = look_through(remote.path(number))
                found = Shard(name, os.fstat(descriptor).st_size, 0, 0, digest, len(starts) - 1), starts
            finally:
                os.close(descriptor)
        made.append(found)
        if tell is not None:
            tell(number + 1, len(remote))
    return made
