"""Writing of files that are either complete or absent, digest lists, and free disk space.

A file is written as a draft, which is synced and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from surefoot.components.data.remote.shards import SUMS, parse_sums
from surefoot.contract.commits import sync_folder
from surefoot.contract.run_folder.files import apply_umask
from surefoot.core.errors import DataError, StorageError, hint_unwritten
from surefoot.core.units import format_bytes, name_some

DRAFT = ".draft"  # not the name of a tar, so that other readers of the folder ignore it
PIECE_BYTES = 4 << 20
SPARE_BYTES = 1 << 20  # for the small files next to tars


@contextlib.contextmanager
def draft_file(path: Path) -> Iterator[Path]:
    """Yield the path of a draft to write; after the block, sync it and rename it to `path`.

    The draft is in the same folder. It is removed if the block raises. Raises StorageError if a
    file cannot be written.
    """
    draft = path.with_name(f".{path.name}{DRAFT}")
    try:
        yield draft
        descriptor = os.open(draft, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        apply_umask(draft)
        draft.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if not isinstance(error, OSError):
            raise
        raise StorageError(
            f"{path} cannot be written: {error.strerror}",
            hint=hint_unwritten(error) + "; the same command continues from there",
        ) from error


@contextlib.contextmanager
def lock_folder(folder: Path, name: str) -> Iterator[BinaryIO]:
    """Open and lock the file `name` in a folder, for reading and appending.

    The lock prevents other processes from writing into the folder with this function. Raises
    DataError if the file cannot be opened, or if another process has locked it.
    """
    try:
        file = (folder / name).open("a+b")
    except OSError as error:
        raise DataError(
            f"{folder} is not writable: {error.strerror}", hint="give another folder"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"another process is writing into {folder}",
                hint="wait until it has ended, or give another folder",
            ) from None
        yield file


def write_whole(path: Path, content: bytes) -> None:
    with draft_file(path) as draft:
        draft.write_bytes(content)


def sweep(folder: Path, names: Iterable[str]) -> None:
    """Remove the drafts that a killed process left when it was writing the files `names`."""
    for name in names:
        (folder / f".{name}{DRAFT}").unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents. Raises DataError if it cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise DataError(
            f"the folder {folder} cannot be created: {why}",
            hint="give another folder to write into",
        ) from None


def refuse_others(folder: Path, others: Iterable[Path]) -> None:
    """Raise DataError if one of the files `others` exists.

    It shows that `folder` belongs to a different data set.
    """
    found = sorted(path.name for path in others if path.exists())
    if found:
        raise DataError(
            f"{folder} holds {name_some(found, 1)}, which belongs to another data set",
            hint="give a new folder",
        )


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise DataError if the disk of a folder has less free space than `needed_bytes`.

    The folder need not exist: its nearest existing parent is on the same disk.
    """
    whole = folder.absolute()
    free = shutil.disk_usage(next(each for each in (whole, *whole.parents) if each.is_dir())).free
    if needed_bytes + SPARE_BYTES > free:
        raise DataError(
            (
                f"{folder} has {format_bytes(free)} of free space, and "
                f"{format_bytes(needed_bytes)} are needed"
            ),
            hint="free some space, or give a folder on another disk",
        )


def write_sums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the digests to a file `SHA256SUMS`, which `sha256sum --check` can read."""
    write_whole(
        folder / SUMS, "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()
    )


def read_sums(folder: Path) -> dict[str, str]:
    """Return the digests in the file `SHA256SUMS` of a folder, by file name.

    The result is empty if there is no such file.
    """
    try:
        return parse_sums((folder / SUMS).read_bytes())
    except OSError:
        return {}
