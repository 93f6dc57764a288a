"""Tars copied to faster storage: room is looked for first, every byte is held against its digest, and each is whole or not there."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.components.data.disk.devices import Device, Speed, drop_cached, find_device, read_speed
from surefoot.components.data.disk.files import (
    PIECE_BYTES,
    check_room,
    digest_of,
    drafted,
    make_folder,
    nearest,
    read_sums,
    sweep,
    write_sums,
)
from surefoot.components.data.remote.shards import SUMS
from surefoot.components.data.tars.index import Index, name_of, open_index, read_index, stamp_of
from surefoot.core.errors import DataError

LOCK = ".surefoot-stage"
MEASURED_BYTES = 256 << 20
MEASURED_S = 2.0
Tell = Callable[[int], None]  # bytes that are done since the last call
BESIDE = ("classes.json", "files.txt")  # what a conversion lays beside tars


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What was copied: the tars, how many were there `kept`, how many were `checked` against a digest that was known before."""

    index: Index
    num_bytes: int
    copied_bytes: int
    kept: int
    checked: int
    source: Device
    dest: Device
    before: Speed
    after: Speed


def stage(tars: Sequence[Path], dest: Path, *, tell: Tell = lambda done: None) -> Staged:
    """Copy tars of one folder into `dest`, with an index and `SHA256SUMS`; what is there already and the same is kept.

    A tar must have the digest that its index says, or else `SHA256SUMS` beside it; without either the copy must have that of the file.
    Raises DataError, before anything is written, for tars of several folders or of one name, for a disk without room, and for a `dest`
    that holds others; and for a tar that is not what its digest says. StorageError for what the disk refuses.
    """
    home, names = _check(tars, dest)
    known = _digests(home, tars)
    size = sum(path.stat().st_size for path in tars)
    there = {path.name for path in tars if (dest / path.name).exists()}
    needed = sum(path.stat().st_size for path in tars if path.name not in there)
    check_room(nearest(dest), needed)
    make_folder(dest)
    with _alone(dest):
        sweep(dest, names)
        before = read_speed(tars, most_bytes=MEASURED_BYTES, most_s=MEASURED_S)
        digests: dict[str, str] = {}
        for path in tars:
            wanted, made = known.get(path.name), dest / path.name
            if path.name in there:
                digests[path.name] = _same(path, made, wanted)
                tell(path.stat().st_size)
            else:
                digests[path.name] = _copy(path, made, wanted, tell)
        beside = _copy_beside(home, dest)
        copies = [dest / name for name in names]
        drop_cached(copies)  # so that what is read back is what the disk has
        index = open_index(copies, dest, beside=True)
        wrong = [shard.name for shard in index.shards if shard.digest != digests[shard.name]]
        if wrong:
            raise DataError(
                f"{dest / wrong[0]} is not what was written", hint="is the disk sound? remove the file and stage again"
            )
        write_sums(dest, digests | beside)
        after = read_speed(copies, most_bytes=MEASURED_BYTES, most_s=MEASURED_S)
    return Staged(
        index=index, num_bytes=size, copied_bytes=needed, kept=len(there), checked=len(known.keys() & digests.keys()),
        source=find_device(home), dest=find_device(dest), before=before, after=after,
    )  # fmt: skip


def _check(tars: Sequence[Path], dest: Path) -> tuple[Path, list[str]]:
    """The folder of the tars, and their names in order."""
    folders, names = {path.resolve().parent for path in tars}, sorted(path.name for path in tars)
    if len(folders) > 1:
        raise DataError(f"the tars lie in {len(folders)} folders", hint="stage one folder after the other, each into its own")
    twice = [name for name in set(names) if names.count(name) > 1] if len(set(names)) < len(names) else []
    if twice:
        raise DataError(f"the tar {twice[0]} is named twice", hint="name each once")
    home = tars[0].parent
    if dest.exists() and not dest.is_dir():
        raise DataError(f"{dest} is a file", hint="name a folder to copy into")
    if dest.resolve() in folders:
        raise DataError(f"{dest} is where the tars lie", hint="name a folder on another disk: /dev/shm/tars")
    others = sorted(path.name for path in dest.glob("*.tar") if path.name not in set(names)) if dest.is_dir() else []
    if (dest / SUMS).exists() and not (dest / LOCK).exists():
        others.append(SUMS)  # somebody else's
    if others:
        raise DataError(f"{dest} holds {others[0]}, which is of another set", hint="name a new folder")
    return home, names


def _digests(home: Path, tars: Sequence[Path]) -> dict[str, str]:
    """What is known of the tars beforehand: by the index beside them where it is of these very files, else by the list beside them."""
    listed = read_sums(home)
    held = {path.name: listed[path.name] for path in tars if path.name in listed}
    every = sorted(path.name for path in home.glob("*.tar"))
    for names in (sorted(path.name for path in tars), every):
        index = read_index(home / name_of(names), home)
        if index is not None:
            stamps = {path.name: stamp_of(path) for path in tars}
            held |= {shard.name: shard.digest for shard in index.shards if stamps.get(shard.name) == shard.stamp}
            break
    return held


def _copy(path: Path, made: Path, wanted: str | None, tell: Tell) -> str:
    """The digest of the tar that was copied."""
    digest = hashlib.sha256()
    try:
        source = path.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", hint="check who may read it") from None
    with source, drafted(made) as draft:
        with draft.open("wb", buffering=0) as file:
            while piece := source.read(PIECE_BYTES):
                digest.update(piece)
                _write_all(file.fileno(), piece)
                tell(len(piece))
        if wanted not in (None, digest.hexdigest()):
            raise _another(path, digest.hexdigest(), wanted)
    return digest.hexdigest()


def _write_all(descriptor: int, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _same(path: Path, made: Path, wanted: str | None) -> str:
    """The digest of a tar that is there already. Raises DataError where it is another one than was to be copied."""
    found = digest_of(made)
    if found != (wanted or digest_of(path)):
        raise DataError(f"{made} is there already, and is another one than {path}", hint="remove it, or name a new folder")
    return found


def _copy_beside(home: Path, dest: Path) -> dict[str, str]:
    """The digests of the small files beside the tars, which are copied too, unless others of their names are there."""
    copied = {}
    for name in BESIDE:
        if (home / name).is_file():
            content = (home / name).read_bytes()
            if not (dest / name).exists():
                with drafted(dest / name) as draft:
                    draft.write_bytes(content)
            if (dest / name).read_bytes() != content:
                raise DataError(f"{dest / name} is there already, and is another one", hint="remove it, or name a new folder")
            copied[name] = hashlib.sha256(content).hexdigest()
    return copied


def _another(path: Path, found: str, wanted: str | None) -> DataError:
    return DataError(
        f"{path} is not what it should be: its SHA-256 is {found}, and {wanted} was expected",
        hint="is it damaged? fetch it again, or remove the index and SHA256SUMS beside it if it was changed on purpose",
    )


@contextlib.contextmanager
def _alone(dest: Path) -> Iterator[None]:
    """Two processes do not copy into one folder."""
    with (dest / LOCK).open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another process copies into {dest}", hint="wait for it, or name another folder") from None
        yield
