"""Copies of tars on faster storage, each either complete or absent, and verified by its digest.

The free disk space is checked first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.components.data.disk.convert import CLASSES, FILES
from surefoot.components.data.disk.devices import (
    Device,
    Speed,
    drop_cached,
    find_device,
    read_speed,
)
from surefoot.components.data.disk.files import (
    PIECE_BYTES,
    check_room,
    draft_file,
    lock_folder,
    make_folder,
    read_sums,
    refuse_others,
    sweep,
    write_sums,
)
from surefoot.components.data.remote.names import check_set
from surefoot.components.data.remote.shards import SUMS
from surefoot.components.data.tars.index import (
    SUFFIX,
    Index,
    digest_of,
    open_index,
    read_index,
    stamp_of,
)
from surefoot.core.errors import DataError

LOCK = ".surefoot-stage"
MEASURED_BYTES = 256 << 20
MEASURED_S = 2.0
Tell = Callable[[int], None]  # called with the bytes done since the last call
BESIDE = (CLASSES, FILES)  # which a conversion writes next to tars


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """Result of copying tars to faster storage.

    `kept` tars existed there already, and `checked` tars had a recorded digest to compare with.
    `before` and `after` are the read speeds of the source and of the copies.
    """

    index: Index
    num_bytes: int
    copied_bytes: int
    kept: int
    checked: int
    source: Device
    dest: Device
    before: Speed
    after: Speed


def stage(tars: Sequence[Path], dest: Path, *, tell: Tell = lambda done: None) -> StageResult:
    """Copy tars of one folder into `dest`, and write an index and `SHA256SUMS` there.

    Existing copies with the expected digest are not copied again. The expected digest of a tar is
    that in an index next to it, or else in `SHA256SUMS` next to it. Without either, an existing
    copy must have the digest of the source file.

    Args:
        tars: The tars.
        dest: The folder of the copies.
        tell: Function that is called with the number of bytes done since its last call.

    Raises:
        DataError: Before anything is written, for tars in several folders or with the same name,
            for too little disk space, and for a `dest` that contains other tars. Later, for a tar
            whose digest does not match.
        StorageError: If a file cannot be written.
    """
    home, names = _check(tars, dest)
    known, sizes = _digests(home, tars), {path.name: path.stat().st_size for path in tars}
    missing = [name for name in names if not (dest / name).exists()]
    needed = sum(sizes[name] for name in missing)
    check_room(dest, needed)
    make_folder(dest)
    with lock_folder(dest, LOCK):
        sweep(dest, names)
        before = read_speed(tars, most_bytes=MEASURED_BYTES, most_s=MEASURED_S)
        digests = {
            path.name: _copy(path, dest / path.name, known.get(path.name), tell) for path in tars
        }
        beside = {
            name: _copy(home / name, dest / name) for name in BESIDE if (home / name).is_file()
        }
        copies = [dest / name for name in names]
        drop_cached(copies)  # so that the copies are read from the disk
        index = open_index(copies, dest, beside=True)
        wrong = next(
            (shard.name for shard in index.shards if shard.digest != digests[shard.name]), None
        )
        if wrong is not None:
            raise DataError(
                f"{dest / wrong} differs from what was written",
                hint="check the disk, remove the file and stage again",
            )
        write_sums(dest, digests | beside)
        after = read_speed(copies, most_bytes=MEASURED_BYTES, most_s=MEASURED_S)
    return StageResult(
        index=index,
        num_bytes=sum(sizes.values()),
        copied_bytes=needed,
        kept=len(names) - len(missing),
        checked=len(known),
        source=find_device(home),
        dest=find_device(dest),
        before=before,
        after=after,
    )


def _check(tars: Sequence[Path], dest: Path) -> tuple[Path, list[str]]:
    """Return the folder of the tars, and their names, sorted.

    Raises DataError if the tars cannot be copied into `dest`.
    """
    names, home = sorted(path.name for path in tars), tars[0].parent
    check_set(names, {path.resolve().parent for path in tars})
    if dest.exists() and not dest.is_dir():
        raise DataError(f"{dest} is a file", hint="give a folder to copy into")
    if dest.resolve() == home.resolve():
        raise DataError(
            f"{dest} is the folder of the tars", hint="give a folder on another disk: /dev/shm/tars"
        )
    others = [path for path in dest.glob("*.tar") if path.name not in names]
    refuse_others(dest, others if (dest / LOCK).exists() else [*others, dest / SUMS])
    return home, names


def _digests(home: Path, tars: Sequence[Path]) -> dict[str, str]:
    """Return the recorded digests of tars, by name.

    The digest in an index next to the tars is used if the tar has not changed since it was indexed,
    otherwise that in `SHA256SUMS`.
    """
    held, stamps = read_sums(home), {stamp_of(path) for path in tars}
    for place in home.glob(f"*{SUFFIX}"):
        index = read_index(place, home)
        held |= {
            shard.name: shard.digest
            for shard in (index.shards if index else ())
            if shard.stamp in stamps
        }
    return {path.name: held[path.name] for path in tars if path.name in held}


def _copy(path: Path, made: Path, wanted: str | None = None, tell: Tell = lambda done: None) -> str:
    """Copy `path` to `made` unless that file exists; return the digest of the copy.

    The digest must equal `wanted`. Without `wanted`, an existing copy must have the digest of
    `path`. Raises DataError if the digests differ.
    """
    if made.exists():
        found = digest_of(made)
        if found != (wanted or digest_of(path)):
            raise DataError(
                f"{made} exists already, and differs from {path}",
                hint="remove it, or give a new folder",
            )
        tell(path.stat().st_size)
        return found
    digest = hashlib.sha256()
    try:
        source = path.open("rb", buffering=0)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", hint="check your permission to read it"
        ) from None
    with source, draft_file(made) as draft, draft.open("wb") as file:
        while piece := source.read(PIECE_BYTES):
            digest.update(piece)
            file.write(piece)
            tell(len(piece))
        if wanted not in (None, digest.hexdigest()):
            raise DataError(
                f"{path} has the SHA-256 {digest.hexdigest()}, but {wanted} was expected",
                hint=(
                    "copy the file again if it is damaged; if it was changed on purpose, "
                    "remove the index and SHA256SUMS beside it"
                ),
            )
    return digest.hexdigest()
