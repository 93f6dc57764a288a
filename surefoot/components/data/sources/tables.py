"""Rows of Parquet and Arrow files by number, through pyarrow, a few groups of rows in memory at a time."""

# B batch

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from surefoot.components.data.sources.asked import check_asked
from surefoot.components.data.tars.decoders import decode
from surefoot.components.data.tars.shards import Sample
from surefoot.components.data.tars.source import join
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError, needing
from surefoot.core.place import whole_path
from surefoot.core.process.forked import make_lock

CACHE_BYTES = 256 << 20
TAIL_BYTES = 1 << 16  # of a file, for its digest: the footer of Parquet, with sizes and statistics, stands there
PARQUET, ARROW = b"PAR1", b"ARROW1"  # how files begin
IMAGES = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp"}
Transform = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Opened:
    """One file: its columns with their types, how many rows each of its groups has, and what reads one."""

    path: Path
    types: dict[str, Any]
    rows: list[int]
    read: Callable[[int], Any]


class Table:
    """Rows of Parquet or Arrow IPC (Feather) files, one after another: `Table(paths, image="img", label="class")` reads dicts.

    Each name stands for a column. Whole numbers become int64 (B,), other numbers and lists of numbers one tensor (lists of several
    lengths are refused: `transform` can pad them), strings a list; bytes, and structs that hold `bytes` (Hugging Face's images), are
    decoded as jpg, png or webp to uint8 (H, W, 3). `transform` is called on each row's dict, before: to bring images to one size.

    A row is read with its whole row group (Parquet) or record batch (Arrow); the ones used last are kept, up to `cache_bytes` or one.
    Shuffled rows of large groups are therefore slow: write groups of some thousand rows. Raises DataError for files that are none of
    these or lack a column, and, when they are read, missing values; MissingExtra without pyarrow.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True  # one reads a group at a time, all take rows of it
    _lock: threading.Lock

    def __init__(
        self, paths: str | Path | Sequence[str | Path], *, transform: Transform | None = None, cache_bytes: int = CACHE_BYTES,
        **columns: str,
    ) -> None:  # fmt: skip
        given = [whole_path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        if not given or not columns:
            raise DataError(
                "Table is told of no file, or no column, to read", hint='Table("a.parquet", text="text", label="class")'
            )
        self._again = partial(Table, given, transform=transform, cache_bytes=cache_bytes, **columns)
        self._columns, self._transform, self._cache_bytes = columns, transform, cache_bytes
        self._files = [_open(path, columns) for path in given]
        for other in self._files[1:]:
            if other.types != self._files[0].types:
                raise DataError(
                    f"{other.path} has {_shown(other)}, {given[0]} {_shown(self._files[0])}", hint="give files of one kind"
                )
        self._groups = [(file, group) for file in self._files for group in range(len(file.rows))]
        self._starts = np.cumsum([0] + [rows for file in self._files for rows in file.rows])
        if not len(self):
            raise DataError(f"{', '.join(map(str, given[:3]))} hold no rows", hint="give 1 or more")
        self._cache: OrderedDict[int, Any] = OrderedDict()  # the group used last at the end
        make_lock(self)
        self.digest = _digest(self._files, columns)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, ids: np.ndarray) -> dict[str, Tensor | list[Any]]:
        check_asked(ids, len(self))
        if not len(ids):
            raise DataError("no sample is asked for", hint="give one number or more")
        groups = np.searchsorted(self._starts, ids, side="right") - 1
        rows: list[dict[str, Any]] = [{} for _ in ids]
        samples = [Sample(self._groups[group][0].path, f"row {number:,}") for group, number in zip(groups, ids, strict=True)]
        for group in np.unique(groups).tolist():
            where = np.flatnonzero(groups == group).tolist()
            table = self._group(group)
            chosen = (ids[where] - self._starts[group]).tolist()
            for name, column in self._columns.items():
                values = table.column(column).take(chosen)
                for place, value in zip(where, values, strict=True):
                    rows[place][name] = _value_of(samples[place], column, value)
        if self._transform is not None:
            rows = [self._transform(row) for row in rows]
        return {name: join(name, [row[name] for row in rows], samples) for name in rows[0]}

    def describe(self) -> str:
        groups, files = len(self._groups), len(self._files)
        types = self._files[0].types
        columns = ", ".join(f"{name} ({types[column]})" for name, column in self._columns.items())
        return f"{len(self):,} rows in {groups:,} groups of {files:,} file{'s' * (files > 1)}: {columns}"

    def _group(self, number: int) -> Any:
        with self._lock:
            if number not in self._cache:
                file, group = self._groups[number]
                with _faults_of(file.path):
                    self._cache[number] = file.read(group)
                held = sum(table.nbytes for table in self._cache.values())
                while held > self._cache_bytes and len(self._cache) > 1:
                    held -= self._cache.popitem(last=False)[1].nbytes
            self._cache.move_to_end(number)
            return self._cache[number]

    def __reduce__(self) -> tuple[Any, ...]:  # another process opens the files itself
        return self._again, ()


def _open(path: Path, columns: dict[str, str]) -> Opened:
    with needing("pyarrow", "pyarrow", extra="arrow", needed_for="reading Parquet and Arrow files"):
        import pyarrow
        import pyarrow.parquet
    wanted = list(dict.fromkeys(columns.values()))
    with _faults_of(path):
        with path.open("rb") as file:
            head = file.read(len(ARROW))
        if head.startswith(PARQUET):
            parquet = pyarrow.parquet.ParquetFile(path, memory_map=True)
            found = parquet.schema_arrow
            rows = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
            read: Callable[[int], Any] = partial(parquet.read_row_group, columns=wanted)
        else:
            mapped = pyarrow.memory_map(str(path))
            if head == ARROW:
                stored = pyarrow.ipc.open_file(mapped)
                rows = [stored.get_batch(group).num_rows for group in range(stored.num_record_batches)]
                read = stored.get_batch
            else:  # a stream, as the cache of Hugging Face's datasets
                stored = pyarrow.ipc.open_stream(mapped)
                batches = list(stored)  # views of the map
                rows, read = [len(batch) for batch in batches], batches.__getitem__
            found = stored.schema
    missing = sorted(set(wanted) - set(found.names))
    if missing:
        raise DataError(f"{path} has no column {', '.join(missing)}", hint=f"it has {', '.join(found.names)}")
    return Opened(path, {name: found.field(name).type for name in wanted}, rows, read)


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """What pyarrow and the system say of a bad file, as DataError."""
    with needing("pyarrow", "pyarrow", extra="arrow", needed_for="reading Parquet and Arrow files"):
        import pyarrow
    try:
        yield
    except (pyarrow.ArrowException, OSError, EOFError) as error:  # ArrowInvalid is a ValueError too
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise DataError(
            f"{path} cannot be read as Parquet or Arrow: {reason}", hint="check the name, who may read it, and copy it again"
        ) from None


def _value_of(sample: Sample, column: str, value: Any) -> Any:
    """One value of a column as a part of a sample: an int, an array, an image, or what pyarrow makes of it."""
    inside = getattr(value, "values", None)
    if inside is not None and not callable(inside):  # a list; of a struct it is the method of a dict
        return _list_of(sample, column, value, inside)
    plain = value.as_py()
    if isinstance(plain, dict) and "bytes" in plain:
        plain = plain["bytes"]
    if plain is None:
        raise DataError(f"{sample.shard}: {sample.key} has no {column}", hint="leave such rows out, or fill them")
    if isinstance(plain, bytes):
        extension = next((name for head, name in IMAGES.items() if plain.startswith(head)), None)
        if extension is None:
            raise DataError(
                f"{sample.shard}: {column} of {sample.key} is no jpg, png or webp", hint="decode it into numbers first"
            )
        return decode(Sample(sample.shard, f"{sample.key}.{column}", {extension: plain}), extension)
    if isinstance(plain, bool | float):
        return np.asarray(plain, dtype={"float": np.float32, "halffloat": np.float16}.get(str(value.type)))
    return plain


def _list_of(sample: Sample, column: str, value: Any, inside: Any) -> Any:
    if inside.null_count:
        raise DataError(f"{sample.shard}: {sample.key} has no {column} in a place", hint="leave such rows out, or fill them")
    try:
        array = np.asarray(value.as_py()) if hasattr(inside, "flatten") else inside.to_numpy(zero_copy_only=False)
    except ValueError:  # lists in it of several lengths
        return value.as_py()
    return array if array.dtype.kind in "biuf" else value.as_py()


def _digest(files: Sequence[Opened], columns: dict[str, str]) -> str:
    digest = hashlib.sha256(repr(columns).encode())
    for opened in files:
        with opened.path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            digest.update(f"{size} {opened.rows}".encode() + file.read())
    return digest.hexdigest()


def _shown(opened: Opened) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in opened.types.items())
