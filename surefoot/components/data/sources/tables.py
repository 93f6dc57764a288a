"""Rows of Parquet and Arrow files by number, through pyarrow, a few groups of rows in memory at a time."""

# B batch

from __future__ import annotations

import functools
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

    Each name stands for a column. Whole numbers become int64 (B,), truth values, other numbers and lists of numbers, however nested, one
    tensor of the column's dtype (lists of several lengths are refused: `transform` can pad them); bytes, and structs that hold `bytes`
    (Hugging Face's images), are decoded as jpg, png or webp to uint8 (H, W, 3). Strings, times, decimals, structs and maps are a list of
    Python's values. `transform` is called on each row's dict, before: to bring images to one size.

    A row is read with its whole row group (Parquet) or record batch (Arrow); the ones used last are kept, up to `cache_bytes` or one.
    Shuffled rows of large groups are therefore slow: write groups of some thousand rows. Raises DataError for files that are none of
    these, lack a column or have one of the type null; and, when they are read, for missing values, also in lists, but not those of a
    field of a struct or of a map, which are None. MissingExtra without pyarrow.
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
                values = table.column(column)  # by number: `take` knows no views of strings, as Polars writes them, and no runs
                for place, number in zip(where, chosen, strict=True):
                    rows[place][name] = _value_of(samples[place], column, values[number])
        if self._transform is not None:
            rows = [self._transform(row) for row in rows]
        else:
            _check_int64(self._columns, rows, samples)
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
    _check_columns(path, wanted, found)
    return Opened(path, {name: found.field(name).type for name in wanted}, rows, read)


def _check_columns(path: Path, wanted: Sequence[str], schema: Any) -> None:
    """Raise DataError for a column that the file does not have, has twice, or has without values."""
    missing = sorted(set(wanted) - set(schema.names))
    if missing:
        raise DataError(f"{path} has no column {', '.join(missing)}", hint=f"it has {', '.join(schema.names)}")
    for column in wanted:
        if (times := schema.names.count(column)) > 1:
            raise DataError(f"{path} has {times} columns of the name {column}", hint="write it again with a name for each")
        if _types().is_null(schema.field(column).type):
            raise DataError(f"column {column} of {path} is of the type null: it holds no values", hint="leave it out, or fill it")


def _check_int64(columns: dict[str, str], rows: Sequence[dict[str, Any]], samples: Sequence[Sample]) -> None:
    """Raise DataError for a whole number that int64 does not hold: a batch with one would be a list, all others a tensor."""
    for name, column in columns.items():
        for row, sample in zip(rows, samples, strict=True):
            if type(row[name]) is int and not -(1 << 63) <= row[name] < 1 << 63:
                raise DataError(
                    f"{sample.shard}: {column} of {sample.key} is {row[name]}, which is no int64",
                    hint="write the column as another type, or as text; or convert it: transform=lambda row: {**row, ...}",
                )


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


@functools.cache
def _types() -> Any:
    """What pyarrow knows of types; it is there once a file is open."""
    import pyarrow.types

    return pyarrow.types


def _value_of(sample: Sample, column: str, value: Any) -> Any:
    """One value of a column as a part of a sample: an int, an array, an image, or what pyarrow makes of it."""
    value, shape = _stored(value)
    if not value.is_valid:
        raise _missing(sample, column)
    if _is_list(value.type):
        array = _numbers_of(sample, column, value.values)
        if array is not None and shape is not None:
            return array.reshape(shape.shape).transpose(shape.permutation or range(len(shape.shape)))
        return _plain_of(sample, column, value) if array is None else array
    plain = _plain_of(sample, column, value)
    if isinstance(plain, dict) and "bytes" in plain:
        plain = plain["bytes"]
        if plain is None:
            raise _missing(sample, column)
    if isinstance(plain, bytes):
        extension = next((name for head, name in IMAGES.items() if plain.startswith(head)), None)
        if extension is None:
            raise DataError(
                f"{sample.shard}: {column} of {sample.key} is no jpg, png or webp", hint="decode it into numbers first"
            )
        return decode(Sample(sample.shard, f"{sample.key}.{column}", {extension: plain}), extension)
    return plain if isinstance(plain, int) and not isinstance(plain, bool) else _as_number(plain, value.type)


def _stored(value: Any) -> tuple[Any, Any]:
    """What a value of a dictionary, a run, a union or an extension of lists stands for; and its type where it is a tensor of a shape."""
    types, shape = _types(), None
    while True:
        kind = value.type
        if types.is_dictionary(kind) or types.is_run_end_encoded(kind) or types.is_union(kind):
            inside = value.value
        elif _is_list(getattr(kind, "storage_type", kind)) and hasattr(kind, "storage_type"):
            inside, shape = value.value, kind if hasattr(kind, "permutation") else None
        else:
            return value, shape
        if inside is None:  # of a missing value
            return value, shape
        value = inside


def _as_number(plain: Any, kind: Any) -> Any:
    """A truth value or a floating-point number as an array of the column's own dtype; all else as it is."""
    types = _types()
    if types.is_floating(kind):
        return np.asarray(plain, dtype=kind.to_pandas_dtype())
    return np.asarray(plain) if isinstance(plain, bool) else plain


def _plain_of(sample: Sample, column: str, value: Any) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError, ImportError) as error:  # nanoseconds, years and zones that Python has not; no UTF-8
        raise DataError(
            f"{sample.shard}: {column} of {sample.key} is of the type {value.type}, and no value of Python: {str(error)[:200]}",
            hint="write the column as another type, times as int64",
        ) from None


def _numbers_of(sample: Sample, column: str, inside: Any) -> np.ndarray | None:
    """The numbers of a list, however nested, as an array of their own dtype; None for other values, and for lists of several lengths."""
    import pyarrow.compute

    types, shape, is_even = _types(), [len(inside)], True
    inside = _decoded(inside)
    while _is_list(inside.type) and not inside.null_count:
        lengths = set(pyarrow.compute.list_value_length(inside).to_pylist())
        is_even &= len(lengths) < 2
        shape.append(max(lengths, default=0))
        inside = _decoded(inside.flatten())
    if inside.null_count:
        raise DataError(f"{sample.shard}: {sample.key} has no {column} in a place", hint="leave such rows out, or fill them")
    if not is_even or not (types.is_integer(inside.type) or types.is_floating(inside.type) or types.is_boolean(inside.type)):
        return None
    flat: np.ndarray = inside.to_numpy(zero_copy_only=False)
    return flat if len(shape) == 1 else flat.reshape(shape).copy()


def _decoded(array: Any) -> Any:
    """The values themselves of an array that holds each once (a dictionary), or each run of equal ones."""
    import pyarrow.compute

    if _types().is_dictionary(array.type):
        return array.dictionary_decode()
    return pyarrow.compute.run_end_decode(array) if _types().is_run_end_encoded(array.type) else array


def _is_list(kind: Any) -> bool:
    types = _types()
    checks = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(check(kind) for check in checks)


def _missing(sample: Sample, column: str) -> DataError:
    return DataError(f"{sample.shard}: {sample.key} has no {column}", hint="leave such rows out, or fill them")


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
