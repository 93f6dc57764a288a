"""Cache of decoded shards, as memory-mapped arrays that later runs open at once.

A decoded set is a folder `<cache>/<key>/` with one raw file per array and a `manifest.json`. The
key is a digest of the names and contents of the shards and of the decoder's name. A set is written
into a hidden folder, synced, and renamed last, so that it is either complete or absent. When a set
is opened:

- The shards are recognized by name, size, time of change and inode, as git recognizes files. If
  these differ, for example on another host, the shards are hashed, and the set is found by its key.
- The arrays are hashed completely (0.1 s for 150 MB if the processor has SHA instructions). A
  damaged set is decoded again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from surefoot.components.data.tars.index import stamp_of
from surefoot.contract.commits import sync_folder
from surefoot.contract.digest import digest_of_file
from surefoot.core.errors import DataError

FORMAT = 1
MANIFEST = "manifest.json"
DRAFT = ".draft-"
DRAFT_LIVES_S = 24 * 3600.0  # a draft this old belongs to a process that died


@dataclass(frozen=True)
class DecodedArrays:
    """Arrays of a decoded set as copy-on-write memory maps, and a digest of their contents."""

    arrays: dict[str, np.ndarray]
    digest: str


Decode = Callable[[Path], Mapping[str, np.ndarray]]


def open_decoded(
    shards: Sequence[Path], cache: Path, *, decoder: str, decode: Decode
) -> DecodedArrays:
    """Open the decoded arrays of `shards` in `cache`; decode the shards if necessary.

    The shards are decoded if the cache has no arrays of them, or if these are damaged.
    `decode(shard)` returns arrays of equal length, one row per sample. `decoder` is the name and
    version of `decode`; arrays from a different decoder are not used. Progress is shown on stderr
    if that is a terminal.

    Raises what `decode` raises, and DataError for a cache that cannot be written or a shard that
    changes while it is read.
    """
    stamps = [list(stamp_of(shard)) for shard in shards]
    folder = _find_by_stamps(cache, decoder, stamps)
    found = _open(folder) if folder else None
    if found is not None:
        return found
    digests = [digest_of_file(shard) for shard in shards]
    if stamps != [list(stamp_of(shard)) for shard in shards]:
        raise DataError(
            f"a shard in {shards[0].parent} changed while it was read",
            hint="wait until the shard is complete",
        )
    known = [[shard.name, digest] for shard, digest in zip(shards, digests, strict=True)]
    folder = cache / hashlib.sha256(json.dumps([FORMAT, decoder, known]).encode()).hexdigest()[:32]
    found = _open(folder)
    if found is None:
        try:
            _write(
                folder,
                {"format": FORMAT, "decoder": decoder, "stamps": stamps, "shards": known},
                shards,
                decode,
            )
        except OSError as error:
            raise DataError(
                f"the cache {cache} cannot be written: {error.strerror}",
                hint="make the folder writable, or train with --set task.cache=DIR",
            ) from error
        found = _open(folder)
    if found is None:
        raise DataError(
            f"the decoded arrays in {folder} cannot be read back",
            hint="check the disk, remove the folder and try again",
        )
    return found


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        row = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) and row.get("format") == FORMAT else None


def _find_by_stamps(cache: Path, decoder: str, stamps: list[list[Any]]) -> Path | None:
    folders = (
        [path for path in cache.iterdir() if not path.name.startswith(".")]
        if cache.is_dir()
        else []
    )
    for folder in sorted(folders):
        row = _read_manifest(folder)
        if row is not None and row.get("stamps") == stamps and row.get("decoder") == decoder:
            return folder
    return None


def _open(folder: Path) -> DecodedArrays | None:
    """Return the arrays of the decoded set in `folder`; None if the set is missing or damaged."""
    row = _read_manifest(folder)
    if row is None:
        return None
    try:
        for name, entry in row["arrays"].items():
            if digest_of_file(folder / name) != entry["sha256"]:
                return None
        # mode "c": torch requires writable memory, and writes never reach the file
        arrays = {
            name: np.memmap(
                folder / name, dtype=entry["dtype"], mode="c", shape=tuple(entry["shape"])
            )
            for name, entry in row["arrays"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return DecodedArrays(
        dict(arrays), hashlib.sha256(json.dumps(row["arrays"], sort_keys=True).encode()).hexdigest()
    )


def _write(folder: Path, row: dict[str, Any], shards: Sequence[Path], decode: Decode) -> None:
    cache = folder.parent
    cache.mkdir(parents=True, exist_ok=True)
    _remove_dead_drafts(cache)
    draft = cache / f"{DRAFT}{uuid.uuid4().hex}"
    # not made by tempfile, whose folders have mode 0700 whatever the umask
    draft.mkdir()
    try:
        _write_draft(draft, row, shards, decode)
        if folder.exists():
            shutil.rmtree(folder)  # it is damaged
        try:
            draft.rename(folder)
        except OSError:
            if _read_manifest(folder) is None:
                raise
        # where the rename failed, another process has decoded the same set meanwhile
        sync_folder(cache)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_draft(draft: Path, row: dict[str, Any], shards: Sequence[Path], decode: Decode) -> None:
    console = Console(stderr=True)
    files = _Files(draft)
    try:
        for shard in track(
            shards,
            "decoding shards",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ):
            files.append(decode(shard))
        row = {**row, "arrays": files.finish()}
    finally:
        files.close()
    with (draft / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(row, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(draft)


class _Files:
    """Writer of one file per array, to which the arrays of each shard are appended.

    Only one shard at a time is in memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._entries: dict[str, dict[str, Any]] = {}

    def append(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            if name not in self._open:
                self._open[name] = (self._folder / name).open("wb")
                self._entries[name] = {
                    "dtype": array.dtype.str,
                    "shape": [0, *array.shape[1:]],
                    "sha256": hashlib.sha256(),
                }
            content = np.ascontiguousarray(array).data
            self._open[name].write(content)
            self._entries[name]["sha256"].update(content)
            self._entries[name]["shape"][0] += len(array)

    def finish(self) -> dict[str, dict[str, Any]]:
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
        return {
            name: {**entry, "sha256": entry["sha256"].hexdigest()}
            for name, entry in self._entries.items()
        }

    def close(self) -> None:
        for file in self._open.values():
            file.close()


def _remove_dead_drafts(cache: Path) -> None:
    for path in cache.glob(f"{DRAFT}*"):
        if time.time() - path.stat().st_mtime > DRAFT_LIVES_S:
            shutil.rmtree(path, ignore_errors=True)
