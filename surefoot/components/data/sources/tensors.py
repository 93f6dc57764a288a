"""Source of the rows of the tensors in a safetensors file, which is memory-mapped.

The header is checked before use.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from surefoot.components.data.order import check_ids
from surefoot.components.data.sources.arrays import DIGEST_SAMPLES, without_readahead
from surefoot.contract.manifest import reject_duplicate_keys
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError, RunFolderError
from surefoot.core.place import whole_path

LENGTH_BYTES = 8
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
    """Header entry of one tensor, whose first byte is at position `start` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class Safetensors:
    """Source of the rows of equally long tensors of one safetensors file, as dicts.

    Example: `Safetensors("set.safetensors", images="x", labels="y")`. Only the requested rows are
    read.

    Args:
        path: The file.
        **parts: Name of the tensor to read for each name in the batch. Without any, all tensors are
            read, under their names in the file.

    Raises:
        DataError: For a file that is truncated or not in safetensors format, a name that is not in
            the file, and tensors that are empty or of different lengths.
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
                f"{self.path}: the tensors do not have one length: {shapes or 'none'}", hint=hint
            )
        self._length = lengths.pop()
        content = np.memmap(self.path, dtype=np.uint8, mode="r")
        self._rows = {name: _as_rows(content, each) for name, each in self.entries.items()}
        self.digest = self._digest(content)

    def __len__(self) -> int:
        return self._length

    def read(self, ids: np.ndarray) -> dict[str, Tensor]:
        ids = check_ids(ids, self._length)
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


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the header entry of each tensor of a safetensors file, after checks of the header.

    The safetensors library rejects unknown dtypes, shapes that do not match the bytes, gaps,
    overlaps, and bytes that belong to no tensor. This function in addition rejects duplicate names
    and null metadata, which the library accepts although the format forbids them. Raises DataError
    for an invalid or unreadable file.
    """
    try:
        with path.open("rb") as file, safe_open(path, "np"):
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = json.loads(file.read(length), object_pairs_hook=reject_duplicate_keys)
        if header.pop(METADATA, {}) is None:
            raise SafetensorError(f"{METADATA} is null")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}",
            hint="check the name, and your permission to read it",
        ) from None
    except (SafetensorError, RunFolderError) as error:
        raise DataError(
            f"{path} is not a valid safetensors file: {error!s:.200}",
            hint="copy it again, or write it with safetensors",
        ) from None
    unknown = next((name for name, row in header.items() if row["dtype"] not in TORCH), None)
    if unknown is not None:
        raise DataError(
            f"tensor {unknown} of {path} is of the dtype {header[unknown]['dtype']}",
            hint=f"supported are {', '.join(TORCH)}",
        )
    begin = LENGTH_BYTES + length
    return {
        name: TensorEntry(row["dtype"], tuple(row["shape"]), begin + row["data_offsets"][0])
        for name, row in header.items()
    }


def _as_rows(content: np.ndarray, entry: TensorEntry) -> np.ndarray:
    """Return the bytes of a tensor as unsigned integers of its item size.

    They are a view of `content`, the whole file. The tensor's dtype is not used, because numpy has
    no bfloat16.
    """
    kind = np.dtype(f"<u{TORCH[entry.dtype].itemsize}")
    return np.ndarray(entry.shape, dtype=kind, buffer=content, offset=entry.start)
