"""Source of the rows of Parquet and Arrow files, read with pyarrow.

Only a few row groups at a time are in memory.
"""

# B batch

from __future__ import annotations

import codecs
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

from surefoot.components.data.order import check_ids
from surefoot.components.data.tars.decoders import decode
from surefoot.components.data.tars.shards import Sample
from surefoot.components.data.tars.source import Transform, make_batch
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError, require_package
from surefoot.core.place import find_files
from surefoot.core.process.forked import make_lock

CACHE_BYTES = 256 << 20
# of a file, for its digest: the footer of Parquet, with sizes and statistics, is at the end
TAIL_BYTES = 1 << 16
PARQUET, ARROW = b"PAR1", b"ARROW1"  # first bytes of the files
IMAGES = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp"}


@dataclass(frozen=True)
class OpenTable:
    """Open Parquet or Arrow file.

    `types` has the type of each column, and `rows` the number of rows of each row group; `read`
    returns the group with a given number.
    """

    path: Path
    types: dict[str, Any]
    rows: list[int]
    read: Callable[[int], Any]


class Table:
    """Source of the rows of Parquet or Arrow IPC (Feather) files, one file after another, as dicts.

    Example: `Table(paths, image="img", label="class")`. The type of a column determines its value
    in a batch:

    - Integers become one int64 tensor (B,).
    - Booleans, other numbers, and lists of numbers, nested to any depth, become one tensor of the
      column's dtype. Lists of different lengths are an error; `transform` can pad them.
    - Bytes, and structs that contain `bytes` (Hugging Face's images), are decoded as jpg, png or
      webp to uint8 (H, W, 3).
    - Strings, times, decimals, structs and maps become a list of Python values.

    To read a row, its whole row group (Parquet) or record batch (Arrow) is read. Reading large
    groups in shuffled order is therefore slow: write groups of some thousand rows.

    Args:
        paths: One file, a pattern such as "train-*.parquet", or a list; with the same columns.
        transform: Function of the dict of each row, called before batching, for example to bring
            images to one size.
        cache_bytes: Maximum size of the most recently used groups that stay in memory; at least one
            group stays.
        **columns: Name of the column to read for each name in the batch.

    Raises:
        DataError: For files in other formats, and for columns that are missing or of the type null.
            On reading, for missing values, even inside a list; but a missing field of a struct or
            of a map is None.
        MissingExtra: If pyarrow is not installed.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True  # one thread reads a group at a time, all take rows of it
    _lock: threading.Lock

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        transform: Transform | None = None,
        cache_bytes: int = CACHE_BYTES,
        **columns: str,
    ) -> None:
        given = find_files(paths)
        if not given or not columns:
            raise DataError(
                "Table needs a file and a column to read",
                hint='Table("a.parquet", text="text", label="class")',
            )
        self._again = partial(Table, given, transform=transform, cache_bytes=cache_bytes, **columns)
        self._columns, self._transform, self._cache_bytes = columns, transform, cache_bytes
        self._files = [_open(path, columns) for path in given]
        for other in self._files[1:]:
            if other.types != self._files[0].types:
                raise DataError(
                    f"{other.path} has {_describe_table(other)}, but "
                    f"{given[0]} has {_describe_table(self._files[0])}",
                    hint="give files with the same columns",
                )
        self._groups = [(file, group) for file in self._files for group in range(len(file.rows))]
        self._starts = np.cumsum([0] + [rows for file in self._files for rows in file.rows])
        if not len(self):
            raise DataError(
                f"{', '.join(map(str, given[:3]))} contain no rows", hint="give 1 or more"
            )
        self._cache: OrderedDict[int, Any] = OrderedDict()  # the most recently used group is last
        make_lock(self)
        self.digest = _digest(self._files, columns)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, ids: np.ndarray) -> dict[str, Tensor | list[Any]]:
        ids = check_ids(ids, len(self))
        groups = np.searchsorted(self._starts, ids, side="right") - 1
        rows: list[dict[str, Any]] = [{} for _ in ids]
        samples = [
            Sample(self._groups[group][0].path, f"row {number:,}")
            for group, number in zip(groups, ids, strict=True)
        ]
        for group in np.unique(groups).tolist():
            where = np.flatnonzero(groups == group).tolist()
            table = self._group(group)
            chosen = (ids[where] - self._starts[group]).tolist()
            for name, column in self._columns.items():
                # by number: `take` supports neither string views, as Polars writes them, nor run-
                # end encoding
                values = table.column(column)
                for place, number in zip(where, chosen, strict=True):
                    rows[place][name] = _value_of(samples[place], column, values[number])
        if self._transform is None:
            _check_int64(self._columns, rows, samples)
        return make_batch(rows, samples, self._transform)

    def describe(self) -> str:
        groups, files = len(self._groups), len(self._files)
        types = self._files[0].types
        columns = ", ".join(f"{name} ({types[column]})" for name, column in self._columns.items())
        return (
            f"{len(self):,} rows in {groups:,} groups of {files:,} file{'s' * (files > 1)}: "
            f"{columns}"
        )

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


def _open(path: Path, columns: dict[str, str]) -> OpenTable:
    with require_package(
        "pyarrow", "pyarrow", extra="arrow", needed_for="reading Parquet and Arrow files"
    ):
        import pyarrow
        import pyarrow.parquet
    wanted = list(dict.fromkeys(columns.values()))
    with _faults_of(path):
        with path.open("rb") as file:
            head = file.read(len(ARROW))
        if head.startswith(PARQUET):
            parquet = pyarrow.parquet.ParquetFile(path, memory_map=True)
            found = parquet.schema_arrow
            rows = [
                parquet.metadata.row_group(group).num_rows
                for group in range(parquet.num_row_groups)
            ]
            read: Callable[[int], Any] = partial(parquet.read_row_group, columns=wanted)
        else:
            mapped = pyarrow.memory_map(str(path))
            if head == ARROW:
                stored = pyarrow.ipc.open_file(mapped)
                rows = [
                    stored.get_batch(group).num_rows for group in range(stored.num_record_batches)
                ]
                read = stored.get_batch
            else:  # a stream, as in the cache of Hugging Face's datasets
                stored = pyarrow.ipc.open_stream(mapped)
                batches = list(stored)  # views of the map
                rows, read = [len(batch) for batch in batches], batches.__getitem__
            found = stored.schema
    _check_columns(path, wanted, found)
    return OpenTable(path, {name: found.field(name).type for name in wanted}, rows, read)


def _check_columns(path: Path, wanted: Sequence[str], schema: Any) -> None:
    """Raise DataError for a column that is missing, occurs twice, or has the type null."""
    missing = sorted(set(wanted) - set(schema.names))
    if missing:
        raise DataError(
            f"{path} has no column {', '.join(missing)}", hint=f"it has {', '.join(schema.names)}"
        )
    for column in wanted:
        if (times := schema.names.count(column)) > 1:
            raise DataError(
                f"{path} has {times} columns named {column}",
                hint="give each column another name",
            )
        if _types().is_null(schema.field(column).type):
            raise DataError(
                f"column {column} of {path} has the type null: it contains no values",
                hint="leave it out, or fill it",
            )


def _check_int64(
    columns: dict[str, str], rows: Sequence[dict[str, Any]], samples: Sequence[Sample]
) -> None:
    """Raise DataError for an integer that does not fit into int64.

    Otherwise, a batch with such an integer would be a list, although all other batches are tensors.
    """
    for name, column in columns.items():
        for row, sample in zip(rows, samples, strict=True):
            if type(row[name]) is int and not -(1 << 63) <= row[name] < 1 << 63:
                raise DataError(
                    (
                        f"{sample.shard}: {column} of {sample.key} is {row[name]}, which "
                        "does not fit into int64"
                    ),
                    hint=(
                        "write the column as a different type, or as text; or convert it: "
                        "transform=lambda row: {**row, ...}"
                    ),
                )


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Convert errors of pyarrow and of the system in the block to DataError about `path`."""
    with require_package(
        "pyarrow", "pyarrow", extra="arrow", needed_for="reading Parquet and Arrow files"
    ):
        import pyarrow
    try:
        yield
    except (pyarrow.ArrowException, OSError, EOFError) as error:  # ArrowInvalid is a ValueError too
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise _explain_unread(path, reason) from None


def _is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are UTF-8 without control characters."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # which may end within a character
    except UnicodeDecodeError:
        return False
    return min(head) >= ord("\t")


def _explain_unread(path: Path, reason: str) -> DataError:
    """Return the error for a file that pyarrow could not read, from the first bytes of the file."""
    message = f"{path} cannot be read as Parquet or Arrow: {reason}"
    try:
        with path.open("rb") as file:
            head = file.read(1024)
    except OSError:
        return DataError(message, hint="check the name and your permission to read it")
    if not head:
        return DataError(f"{path} is empty", hint="write it again as Parquet or Arrow")
    if not head.startswith((PARQUET, ARROW)) and _is_text(head):
        reader = "json.read_json" if head.lstrip().startswith(b"{") else "csv.read_csv"
        return DataError(
            f"{path} is a text file, not Parquet or Arrow",
            hint=f"convert it once: pyarrow.parquet.write_table(pyarrow.{reader}("
            f"{path.name!r}), {path.with_suffix('.parquet').name!r})",
        )
    return DataError(message, hint="write it as Parquet or Arrow, or copy it again if it is cut")


@functools.cache
def _types() -> Any:
    """Return the module `pyarrow.types`, which is imported in the first call."""
    import pyarrow.types

    return pyarrow.types


def _value_of(sample: Sample, column: str, value: Any) -> Any:
    """Convert a value of a column to an int, an array, an image or another Python value.

    `sample` names the row in errors. Raises DataError for a missing or invalid value.
    """
    value, shape = _storage_value(value)
    if not value.is_valid:
        raise _missing(sample, column)
    if _is_list(value.type):
        array = _numbers_of(sample, column, value.values)
        if array is not None and shape is not None:
            return array.reshape(shape.shape).transpose(
                shape.permutation or range(len(shape.shape))
            )
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
                f"{sample.shard}: {column} of {sample.key} is not a jpg, png or webp",
                hint="decode it into numbers first",
            )
        return decode(Sample(sample.shard, f"{sample.key}.{column}", {extension: plain}), extension)
    return (
        plain
        if isinstance(plain, int) and not isinstance(plain, bool)
        else _as_number(plain, value.type)
    )


def _storage_value(value: Any) -> tuple[Any, Any]:
    """Return the plain value inside a dictionary, run-end, union or list extension value.

    The second result is the extension type of a fixed-shape tensor, and None for other values.
    """
    types, shape = _types(), None
    while True:
        kind = value.type
        if types.is_dictionary(kind) or types.is_run_end_encoded(kind) or types.is_union(kind):
            inside = value.value
        elif _is_list(getattr(kind, "storage_type", kind)) and hasattr(kind, "storage_type"):
            inside, shape = value.value, kind if hasattr(kind, "permutation") else None
        else:
            return value, shape
        if inside is None:  # a missing value
            return value, shape
        value = inside


def _as_number(plain: Any, kind: Any) -> Any:
    """Return a boolean or a float as an array of the column's dtype, other values unchanged."""
    types = _types()
    if types.is_floating(kind):
        return np.asarray(plain, dtype=kind.to_pandas_dtype())
    return np.asarray(plain) if isinstance(plain, bool) else plain


def _plain_of(sample: Sample, column: str, value: Any) -> Any:
    try:
        return value.as_py()
    # nanoseconds, years and time zones that Python does not have; invalid UTF-8
    except (ValueError, OverflowError, ImportError) as error:
        raise DataError(
            (
                f"{sample.shard}: {column} of {sample.key} is of the type {value.type}, which "
                f"has no Python value: {str(error)[:200]}"
            ),
            hint="write the column as a different type, times as int64",
        ) from None


def _numbers_of(sample: Sample, column: str, inside: Any) -> np.ndarray | None:
    """Return the numbers of a list, nested to any depth, as an array of their dtype.

    Returns None for other values, and for lists of different lengths. Raises DataError for a
    missing value.
    """
    import pyarrow.compute

    types, shape, is_even = _types(), [len(inside)], True
    inside = _decode_array(inside)
    while _is_list(inside.type) and not inside.null_count:
        lengths = set(pyarrow.compute.list_value_length(inside).to_pylist())
        is_even &= len(lengths) < 2
        shape.append(max(lengths, default=0))
        inside = _decode_array(inside.flatten())
    if inside.null_count:
        raise _missing(sample, column)
    if not is_even or not (
        types.is_integer(inside.type)
        or types.is_floating(inside.type)
        or types.is_boolean(inside.type)
    ):
        return None
    flat: np.ndarray = inside.to_numpy(zero_copy_only=False)
    return flat if len(shape) == 1 else flat.reshape(shape).copy()


def _decode_array(array: Any) -> Any:
    """Decode an array that is dictionary-encoded or run-end encoded; return others unchanged."""
    import pyarrow.compute

    if _types().is_dictionary(array.type):
        return array.dictionary_decode()
    return (
        pyarrow.compute.run_end_decode(array) if _types().is_run_end_encoded(array.type) else array
    )


def _is_list(kind: Any) -> bool:
    types = _types()
    checks = (
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    )
    return any(check(kind) for check in checks)


def _missing(sample: Sample, column: str) -> DataError:
    return DataError(
        f"{sample.shard}: {sample.key} has a null in {column}",
        hint="leave rows with nulls out, or fill them",
    )


def _digest(files: Sequence[OpenTable], columns: dict[str, str]) -> str:
    digest = hashlib.sha256(repr(columns).encode())
    for opened in files:
        with opened.path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            digest.update(f"{size} {opened.rows}".encode() + file.read())
    return digest.hexdigest()


def _describe_table(opened: OpenTable) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in opened.types.items())
