"""Rows of the tensors of a safetensors file, memory-mapped; the header is checked before use."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.sources.arrays import DIGEST_SAMPLES, without_readahead
from surefoot.components.data.sources.asked import check_asked
from surefoot.contract.manifest import ITEM_BYTES, MAX_DIMS
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError
from surefoot.core.place import whole_path

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
METADATA = "__metadata__"  # a table of texts besides the tensors
TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class TensorEntry:
    """Header entry of one tensor; its bytes are at `start` to `stop` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Safetensors:
    """Rows of equally long tensors of one file, as dicts.

    Example: `Safetensors("set.safetensors", images="x", labels="y")`. Without names, all tensors of
    the file are read, under their names. Only the requested rows are read. Raises DataError for a
    file that is not safetensors or is truncated, a header whose sizes do not fit, a name that is
    not in the file, and tensors of different lengths.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True

    def __init__(self, path: str | Path, **parts: str) -> None:
        self.path = whole_path(path)
        self._again = partial(Safetensors, **parts)
        held = read_header(self.path)
        missing = sorted(set(parts.values()) - held.keys())
        if missing:
            raise DataError(
                f"{self.path} has no tensor {', '.join(missing)}",
                hint=f"it contains {', '.join(sorted(held)) or 'none'}",
            )
        self.entries = (
            {name: held[tensor] for name, tensor in parts.items()} if parts else dict(held)
        )
        shapes = ", ".join(f"{name} {each.shape}" for name, each in self.entries.items())
        lengths = {each.shape[0] if each.shape else 0 for each in self.entries.values()}
        if len(lengths) != 1 or 0 in lengths:
            hint = (
                "give tensors of one length, at least 1: Safetensors(path, images='x', labels='y')"
            )
            raise DataError(
                f"{self.path}: {shapes or 'no tensors'} do not have one length", hint=hint
            )
        self._length = lengths.pop()
        content = np.memmap(self.path, dtype=np.uint8, mode="r")
        self._rows = {name: _as_rows(content, each) for name, each in self.entries.items()}
        self.digest = self._digest(content)

    def __len__(self) -> int:
        return self._length

    def read(self, ids: np.ndarray) -> dict[str, Tensor]:
        check_asked(ids, self._length)
        return {
            name: torch.from_numpy(rows[ids]).view(TORCH[self.entries[name].dtype])
            for name, rows in self._rows.items()
        }

    def describe(self) -> str:
        parts = ", ".join(
            f"{name} {each.shape} {each.dtype}" for name, each in self.entries.items()
        )
        return f"{self._length:,} samples of {self.path.name}: {parts}"

    def _digest(self, content: np.ndarray) -> str:
        digest = hashlib.sha256()
        chosen = np.unique(np.linspace(0, self._length - 1, DIGEST_SAMPLES).astype(np.int64))
        with without_readahead(content):
            for name, rows in self._rows.items():
                digest.update(f"{name} {self.entries[name].dtype} {rows.shape} ".encode())
                digest.update(rows[chosen].data)
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:  # another process maps the file itself
        return self._again, (self.path,)


def read_header(path: Path) -> Mapping[str, TensorEntry]:
    """Return the header entries of a safetensors file, by name; only the header is read.

    Raises DataError for anything that the format (https://huggingface.co/docs/safetensors) does not
    allow: types, sizes, duplicate names, metadata that are not texts, and bytes that belong to no
    tensor or to two.
    """
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if num_bytes < LENGTH_BYTES or length > num_bytes - LENGTH_BYTES:
                raise _fault(
                    path, f"its header states {length:,} bytes, and the file has {num_bytes:,}"
                )
            if length > MAX_HEADER_BYTES:
                raise _fault(
                    path,
                    (
                        f"its header has {length:,} bytes, "
                        f"and at most {MAX_HEADER_BYTES:,} are allowed"
                    ),
                )
            text = file.read(length)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            hint="check the name, and your permission to read it",
        ) from None
    if not text.startswith(b"{"):
        raise _fault(path, "its header does not begin with {")
    try:
        header = json.loads(
            text.decode(),
            object_pairs_hook=partial(_without_doubles, path),
            parse_constant=partial(_refuse_constant, path),
        )
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"its header is not JSON: {error}") from None
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise _fault(path, f"its {METADATA} is not a table of strings: {metadata!r:.80}")
    begin = LENGTH_BYTES + length
    held = {name: _entry(path, name, row, begin, num_bytes) for name, row in header.items()}
    _check_tiling(path, held, begin, num_bytes)
    return held


def _check_tiling(path: Path, held: Mapping[str, TensorEntry], begin: int, num_bytes: int) -> None:
    """Raise DataError unless every byte after the header belongs to exactly one tensor.

    Bytes that belong to no tensor could be another file.
    """
    end, before = begin, ""
    for name, entry in sorted(held.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < end:
            raise _fault(path, f"its tensors {before} and {name} overlap")
        if entry.start > end:
            raise _fault(
                path, f"{entry.start - end:,} bytes before its tensor {name} belong to no tensor"
            )
        end, before = entry.stop, name
    if end < num_bytes:
        raise _fault(path, f"{num_bytes - end:,} bytes at its end belong to no tensor")


def _refuse_constant(path: Path, text: str) -> None:
    raise _fault(path, f"its header is not JSON: {text} is not a JSON number")


def _entry(path: Path, name: str, row: Any, begin: int, num_bytes: int) -> TensorEntry:
    said: dict[str, Any] = row if isinstance(row, dict) else {}
    dtype, shape, offsets = said.get("dtype"), said.get("shape"), said.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _fault(
            path,
            (
                f"its tensor {name} is of the dtype {dtype!r:.40}; supported are "
                f"{', '.join(ITEM_BYTES)}"
            ),
        )
    if not (
        _are_counts(shape) and len(shape) <= MAX_DIMS and _are_counts(offsets) and len(offsets) == 2
    ):
        raise _fault(
            path, f"its tensor {name} has no valid shape or offsets: {shape!r:.80}, {offsets!r:.80}"
        )
    start, stop = (begin + offset for offset in offsets)
    if start > stop or stop > num_bytes:
        raise _fault(
            path,
            (
                f"its tensor {name} is at bytes {start:,} to {stop:,}, and the file has "
                f"{num_bytes:,}"
            ),
        )
    if math.prod(shape) * ITEM_BYTES[dtype] != stop - start:
        raise _fault(
            path, f"its tensor {name} is {dtype} {tuple(shape)} and has {stop - start:,} bytes"
        )
    return TensorEntry(dtype, tuple(shape), start, stop)


def _are_counts(given: Any) -> TypeGuard[list[int]]:
    return isinstance(given, list) and all(
        type(each) is int and 0 <= each < 1 << 48 for each in given
    )


def _without_doubles(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _fault(path, "a name occurs twice in its header")
    return made


def _fault(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is not a valid safetensors file: {reason}",
        hint="copy it again, or write it with safetensors",
    )


def _as_rows(content: np.ndarray, entry: TensorEntry) -> np.ndarray:
    """Return the bytes of a tensor as unsigned integers of its item size.

    numpy has no bfloat16, and the bytes may be at any offset.
    """
    kind = np.dtype(f"<u{ITEM_BYTES[entry.dtype]}")
    return np.ndarray(entry.shape, dtype=kind, buffer=content, offset=entry.start)
