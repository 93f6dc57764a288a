"""Conversion of samples to tars of bounded size, each complete or absent, even after a kill.

A shard is written as a draft that is synced and renamed; then a line of the progress file records
its number of samples and its digest. The first line of the progress file identifies the source and
the settings. A later process resumes after the last consecutive shard whose digest matches. The
output depends on the source and the settings alone: a killed and resumed conversion writes the same
bytes as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from surefoot.components.data.blocks import Order
from surefoot.components.data.disk.encode import END, frame
from surefoot.components.data.disk.files import (
    check_room,
    drafted,
    lock_folder,
    make_folder,
    sweep,
    write_sums,
    write_whole,
)
from surefoot.components.data.disk.given import Given
from surefoot.components.data.remote.shards import SUMS
from surefoot.components.data.tars.index import digest_of
from surefoot.contract.commits import sync_folder
from surefoot.core.errors import DataError
from surefoot.core.units import name_some

FORMAT = "surefoot convert 1"
PROGRESS = ".surefoot-convert"
LEAST_SHARD = 10 << 10  # bytes
MOST_SHARDS = 100_000  # names have five digits, so that sorting them gives the order of the samples
LEAST_DIGITS = 6  # minimum digits of a sample's number
LOOKED_UP = 4096  # positions of an order computed at once
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
Tell = Callable[[int], None]  # called with the samples done since the last call
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ShardNaming:
    """Names and sizes of tars: `NAME-00000.tar` and so on, each of at most `shard_bytes`.

    A tar exceeds `shard_bytes` only if a single sample does. Samples are in the order of the
    source, or, with the seed `shuffle`, in the order of the first epoch of a run with that seed.
    Raises DataError.
    """

    name: str = "shard"
    shard_bytes: int = 256 << 20
    shuffle: int | None = None

    def __post_init__(self) -> None:
        if self.shard_bytes < LEAST_SHARD:
            raise DataError(
                f"tars of {self.shard_bytes:,} bytes are too small",
                hint=f"give {LEAST_SHARD:,} bytes or more",
            )
        if not PLAIN.fullmatch(self.name):
            raise DataError(
                f"tars cannot have the name {self.name!r}",
                hint="a name has letters, digits, _ and -, and begins with one",
            )


@dataclass(frozen=True, kw_only=True)
class Written:
    """Written shard: its name, number of samples, size in bytes and SHA-256 digest."""

    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ConvertedShards:
    """Shards in order, of which `kept` existed before; `beside` names the other files written."""

    shards: tuple[Written, ...]
    kept: int
    beside: tuple[str, ...] = ()

    @property
    def num_samples(self) -> int:
        return sum(each.samples for each in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(each.bytes for each in self.shards)


def convert(
    given: Given,
    out: Path,
    layout: ShardNaming,
    *,
    tell: Tell = lambda done: None,
    say: Say = lambda text: None,
) -> ConvertedShards:
    """Write the samples as tars into the folder `out`, or resume there; write `SHA256SUMS` last.

    Raises DataError, before anything is written, if `out` holds other tars, was started from
    another source or with other settings, or is being written by another process, and if the disk
    has too little space. Raises StorageError for what the disk refuses later.
    """
    if layout.shuffle is not None and not given.seekable:
        raise DataError("a sequential source cannot be shuffled", hint="leave --shuffle out")
    if not (out / PROGRESS).exists():
        _check_empty(out, given)
        check_room(out, given.num_bytes or 0)
    make_folder(out)
    head = {"format": FORMAT, "source": given.identity, "settings": asdict(layout)}
    with lock_folder(out, PROGRESS) as file:
        shards = _read_progress(out, file, head)
        # the last shard may lack its line in the progress file
        ours = [f"{layout.name}-{number:05}.tar" for number in range(len(shards) + 1)]
        _refuse(out, [path for path in out.glob("*.tar") if path.name not in ours])
        sweep(out, [*ours, *given.beside, SUMS])
        _keep_whole(out, file, shards, say)
        kept, place = len(shards), sum(each.samples for each in shards)
        check_room(out, max(0, (given.num_bytes or 0) - sum(each.bytes for each in shards)))
        tell(place)
        samples = _frames(given, layout.shuffle, place)
        framed = next(samples, None)
        while framed is not None:
            if len(shards) == MOST_SHARDS:
                raise DataError(
                    f"there are more than {MOST_SHARDS:,} tars", hint="give a larger --shard-size"
                )
            path = out / f"{layout.name}-{len(shards):05}.tar"
            made, framed = _write(path, framed, samples, layout.shard_bytes, tell)
            _append(file, asdict(made))
            shards.append(made)
    for name, content in given.beside.items():
        write_whole(out / name, content)
    beside = {name: hashlib.sha256(content).hexdigest() for name, content in given.beside.items()}
    write_sums(out, {each.name: each.sha256 for each in shards} | beside)
    return ConvertedShards(shards=tuple(shards), kept=kept, beside=tuple(beside))


def _frames(given: Given, shuffle: int | None, first: int) -> Iterator[bytes]:
    """Yield the samples as members of a tar, from position `first` of the order."""
    digits, order = (
        max(LEAST_DIGITS, len(str(len(given) - 1))),
        Order(len(given), shuffle or 0, shuffle=shuffle is not None),
    )
    for begin in range(first, len(given), LOOKED_UP):
        for number in order.ids(0, begin, min(begin + LOOKED_UP, len(given))).tolist():
            yield frame(f"{number:0{digits}}", given.sample(number))


def _write(
    path: Path, first: bytes, samples: Iterator[bytes], most_bytes: int, tell: Tell
) -> tuple[Written, bytes | None]:
    """Write `first` and as many samples as fit into one shard.

    Returns the shard, and the first sample of the next shard (None if there is none).
    """
    digest, size, count, after = hashlib.sha256(), 0, 0, cast(bytes | None, first)
    with drafted(path) as draft, draft.open("wb") as file:
        while after is not None and (not count or size + len(after) + len(END) <= most_bytes):
            file.write(after)
            digest.update(after)
            size, count = size + len(after), count + 1
            tell(1)
            after = next(samples, None)
        file.write(END)
        digest.update(END)
        file.flush()  # drafted() syncs the file
    return Written(
        name=path.name, samples=count, bytes=size + len(END), sha256=digest.hexdigest()
    ), after


def _keep_whole(out: Path, file: BinaryIO, shards: list[Written], say: Say) -> None:
    """Remove the first missing or damaged shard, and all later shards, from `shards`.

    The progress file is truncated to the lines of the remaining shards.
    """
    for number, each in enumerate(shards):
        is_there = (out / each.name).is_file()
        if not is_there or digest_of(out / each.name) != each.sha256:
            say(
                f"{each.name} is {'damaged' if is_there else 'missing'}: this tar and the "
                "following ones are written again"
            )
            del shards[number:]
            break
    file.seek(0)
    # an incomplete last line is removed, too
    file.truncate(sum(len(file.readline()) for _ in range(len(shards) + 1)))


def _append(file: BinaryIO, row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _read_progress(out: Path, file: BinaryIO, head: Mapping[str, Any]) -> list[Written]:
    """Return the shards that a progress file lists; begin a new file with `head`.

    Raises DataError if the file is damaged or belongs to another conversion.
    """
    file.seek(0)
    lines = [line for line in file if line.endswith(b"\n")]
    if not lines:
        file.truncate(0)
        _append(file, head)
        sync_folder(out)
        return []
    try:
        begun, *rows = map(json.loads, lines)
        known = [Written(**row) for row in rows]
        was = dict(begun["settings"])
        changed = [
            f"{name} {was.get(name)}, not {value}"
            for name, value in head["settings"].items()
            if was.get(name) != value
        ]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{out / PROGRESS} is damaged", hint="convert into a new folder") from None
    if begun != head:
        raise DataError(
            f"{out} was started with {'; '.join(changed)}"
            if changed
            else f"{out} was started from another source or by another version, "
            "or the source has changed since then",
            hint="repeat the first command, or give a new folder",
        )
    return known


def _check_empty(out: Path, given: Given) -> None:
    """Raise DataError if `out` holds tars, or other files that the conversion would write."""
    _refuse(out, [*out.glob("*.tar"), *(out / name for name in (*given.beside, SUMS))])


def _refuse(out: Path, others: list[Path]) -> None:
    found = sorted(path.name for path in others if path.exists())
    if found:
        raise DataError(
            f"{out} holds {name_some(found, 1)}, which belongs to another data set",
            hint="give a new folder",
        )


def plain_name(folder: Path) -> str:
    """Return the name for tars of `folder`: the folder's name, or `shard` if that is not plain."""
    name = folder.resolve().name
    return name if PLAIN.fullmatch(name) else ShardNaming.name


__all__ = ["ConvertedShards", "ShardNaming", "Written", "convert", "plain_name"]
