"""Conversion of a folder of images to tars of limited size, each either complete or absent.

The sizes of the images determine in advance which images each tar contains. The digest of a tar is
recorded as soon as it is written. A later process can thus resume: it writes only the tars that are
missing or changed. The bytes depend only on the images and the settings.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from surefoot.components.data.blocks import Order
from surefoot.components.data.disk.files import (
    check_room,
    draft_file,
    lock_folder,
    make_folder,
    refuse_others,
    sweep,
    write_sums,
    write_whole,
)
from surefoot.components.data.remote.shards import SUMS, parse_sums
from surefoot.components.data.sources.images import ImageFolder
from surefoot.components.data.tars.index import Index, open_index
from surefoot.components.data.tars.shards import BLOCK
from surefoot.contract.digest import digest_of_file
from surefoot.core.errors import DataError

SETTINGS = ".surefoot-convert"
CLASSES, FILES = "classes.json", "files.txt"
MIN_SHARD = RECORD = tarfile.RECORDSIZE  # bytes: the size of a tar is a multiple of it
END_BYTES = 2 * BLOCK  # two empty blocks end a tar
MAX_SHARDS = 100_000  # names have five digits, so that sorting them gives the order of the samples
MIN_DIGITS = 6  # minimum digits of a sample's number
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
Tell = Callable[[int], None]  # called with the samples done since the last call


@dataclass(frozen=True, kw_only=True)
class ShardNaming:
    """Names and sizes of tars: `NAME-00000.tar` and so on, each of at most `shard_bytes`.

    A tar exceeds `shard_bytes` only if it contains a single, larger sample. With `shuffle`, the
    samples are in the order of the first epoch of a run with this seed; otherwise, they are in the
    order of the source. Raises DataError for an invalid name or size.
    """

    name: str = "shard"
    shard_bytes: int = 256 << 20
    shuffle: int | None = None

    def __post_init__(self) -> None:
        if self.shard_bytes < MIN_SHARD:
            raise DataError(
                f"tars of {self.shard_bytes:,} bytes are too small",
                hint=f"give {MIN_SHARD:,} bytes or more",
            )
        if not PLAIN.fullmatch(self.name):
            raise DataError(
                f"tars cannot have the name {self.name!r}",
                hint="a name has letters, digits, _ and -, and begins with one",
            )


@dataclass(frozen=True, kw_only=True)
class ConvertedShards:
    """Result of a conversion to tars.

    `index` is the index of the tars, `kept` of which existed before. `parts` has the file extension
    of each part of a sample. `beside` has the names of the other files that were written.
    """

    index: Index
    kept: int
    parts: dict[str, str]
    beside: tuple[str, ...]


def convert(
    images: ImageFolder, out: Path, layout: ShardNaming, *, tell: Tell = lambda done: None
) -> ConvertedShards:
    """Convert images and their class indices to tars in the folder `out`, or resume a conversion.

    The file `classes.json` maps class indices to names, and `files.txt` lists the file of each
    sample. An index and `SHA256SUMS` are written last.

    Args:
        images: The images.
        out: The folder of the tars.
        layout: Names, sizes and order of the tars.
        tell: Function that is called with the number of samples done since its last call.

    Raises:
        DataError: Before anything is written, if `out` contains other tars, was started from other
            images or with other settings, or is being written by another process, or if the disk
            has too little space.
        StorageError: If a file cannot be written.
    """
    shards = {
        f"{layout.name}-{number:05}.tar": numbers
        for number, numbers in enumerate(_plan(images, layout))
    }
    sizes = {name: _tar_bytes(images, numbers) for name, numbers in shards.items()}
    beside = {CLASSES: _classes(images), FILES: _files(images)}
    if not (out / SETTINGS).exists():
        refuse_others(out, [*out.glob("*.tar"), *(out / name for name in (*beside, SUMS))])
        check_room(out, sum(sizes.values()))
    make_folder(out)
    with lock_folder(out, SETTINGS) as file:
        settings = json.dumps({"images": _identity(images), **asdict(layout)}).encode() + b"\n"
        file.seek(0)
        held, newline, _ = file.read().rpartition(b"\n")
        held += newline
        file.truncate(len(held))  # a line that a killed process wrote in part
        if held and not held.startswith(settings):
            raise DataError(
                f"{out} was started from other images or with other settings",
                hint="repeat the first command, or give a new folder",
            )
        if not held:
            _append(file, settings)
        refuse_others(out, [path for path in out.glob("*.tar") if path.name not in shards])
        sweep(out, [*shards, *beside, SUMS])
        digests = parse_sums(held)
        missing = [
            name
            for name in shards
            if _size(out / name) != sizes[name] or digest_of_file(out / name) != digests.get(name)
        ]
        check_room(out, sum(sizes[name] for name in missing))
        for name, numbers in shards.items():
            if name in missing:
                _write(out / name, images, numbers)
                _append(file, f"{digest_of_file(out / name)}  {name}\n".encode())
            tell(len(numbers))
        for name, content in beside.items():
            write_whole(out / name, content)
        index = open_index([out / name for name in shards], out, beside=True)
        write_sums(
            out,
            {shard.name: shard.digest for shard in index.shards}
            | {name: hashlib.sha256(content).hexdigest() for name, content in beside.items()},
        )
    return ConvertedShards(
        index=index,
        kept=len(shards) - len(missing),
        parts=_part_extensions(images),
        beside=(*beside, SUMS),
    )


def _plan(images: ImageFolder, layout: ShardNaming) -> list[list[int]]:
    """Return the sample numbers of each tar, in order. Raises DataError for too many tars."""
    order = Order(len(images), layout.shuffle or 0, shuffle=layout.shuffle is not None)
    capacity = layout.shard_bytes // RECORD * RECORD - END_BYTES
    shards: list[list[int]] = []
    left = 0
    for number in order.ids(0, 0, len(images)).tolist():
        needed = _sample_bytes(images, number)
        if needed > left:
            shards.append([])
            left = capacity
        shards[-1].append(number)
        left -= needed
    if len(shards) > MAX_SHARDS:
        raise DataError(f"there are more than {MAX_SHARDS:,} tars", hint="give a larger size")
    return shards


def _label(images: ImageFolder, number: int) -> bytes:
    return str(images.label(number)).encode()


def _sample_bytes(images: ImageFolder, number: int) -> int:
    """Return the bytes of a sample in a tar: its image and its label, with their headers."""
    sizes = images.sizes[number], len(_label(images, number))
    return sum(BLOCK + -(-size // BLOCK) * BLOCK for size in sizes)


def _tar_bytes(images: ImageFolder, numbers: Iterable[int]) -> int:
    """Return the size in bytes of the tar that `tarfile` writes for these samples."""
    held = sum(_sample_bytes(images, number) for number in numbers) + END_BYTES
    return -(-held // RECORD) * RECORD


def _write(path: Path, images: ImageFolder, numbers: Sequence[int]) -> None:
    """Write samples as a tar in ustar format (POSIX.1-1988), with owner and modification time 0."""
    digits = max(MIN_DIGITS, len(str(len(images) - 1)))
    with (
        draft_file(path) as draft,
        tarfile.open(draft, "w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for number in numbers:
            parts = {**images.content(number).parts, "cls": _label(images, number)}
            for extension, content in parts.items():
                member = tarfile.TarInfo(f"{number:0{digits}}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            archive.members = []  # type: ignore[attr-defined] # tarfile would keep them all


def _append(file: BinaryIO, line: bytes) -> None:
    file.write(line)
    file.flush()
    os.fsync(file.fileno())


def _classes(images: ImageFolder) -> bytes:
    classes = {str(number): name for number, name in enumerate(images.classes)}
    return (json.dumps(classes, indent=1) + "\n").encode()


def _files(images: ImageFolder) -> bytes:
    lines = (name if name.isprintable() else json.dumps(name) for name in images.names)
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")


def _part_extensions(images: ImageFolder) -> dict[str, str]:
    """Return the file extension of each part of a sample, by the name of the part.

    The image is the part `image` if all images have the same extension. Otherwise, each extension
    is a separate part of that name.
    """
    kinds = sorted({name.rpartition(".")[2].lower() for name in images.names})
    named = {"image": kinds[0]} if len(kinds) == 1 else {kind: kind for kind in kinds}
    return {**named, "label": "cls"}


def _identity(images: ImageFolder) -> str:
    """Return a digest of the names, sizes and modification times of all images."""
    try:
        changed = [(images.folder / name).stat().st_mtime_ns for name in images.names]
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}",
            hint="check that the file still exists",
        ) from None
    return hashlib.sha256(f"{images.digest} {changed}".encode()).hexdigest()


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def plain_name(folder: Path) -> str:
    """Return the name for tars of `folder`: the name of the folder, if it is valid, else `shard`.

    A valid name has only letters, digits, _ and -.
    """
    name = folder.resolve().name
    return name if PLAIN.fullmatch(name) else ShardNaming.name
