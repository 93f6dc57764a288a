"""Comparison of two checkpoints, tensor by tensor.

The comparison needs NumPy but not torch. It verifies the digest of every file that it reads.
"""

from __future__ import annotations

import json
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.contract import commits, digest, manifest
from surefoot.contract.manifest import Entry, Manifest, Piece
from surefoot.contract.run_folder import files
from surefoot.core.errors import RunFolderError

TIMES = "clock.json"  # the one file that differs between equal runs
# NumPy dtypes for those of safetensors; dtypes that NumPy lacks are read as bits and decoded below
DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": np.uint16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "I64": np.int64,
    "U64": np.uint64,
    "F64": np.float64,
    "C64": np.complex64,
}
MIN_VECTOR = 16  # a list of this many plain values or more in a JSON file is one value
BLOCK = 1 << 20  # values compared at once


@dataclass(frozen=True)
class ValueDifference:
    """Difference between two checkpoints in a tensor, a JSON value or a file.

    `what` describes the difference. For a tensor or a list, `num_different` of `num_values` values
    differ. For a tensor, `max_abs` is the largest absolute difference over pairs of values that are
    both finite; None if there is no such pair.
    """

    file: str
    name: str
    what: str
    num_different: int | None = None
    num_values: int | None = None
    max_abs: float | None = None

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def compare(one: Path, other: Path) -> tuple[list[ValueDifference], int]:
    """Return the differences between two checkpoints, and the number of equal tensors.

    The times in clock.json are ignored.

    Raises:
        RunFolderError: if a checkpoint is damaged.
    """
    manifests = manifest.read(one), manifest.read(other)
    entries = [{entry.name: entry for entry in made.files} for made in manifests]
    found: list[ValueDifference] = []
    same = 0
    with commits.hashing(commits.MANY_THREADS, nice=0) as pool:
        for folder, made in zip((one, other), manifests, strict=True):
            # files that two manifests call equal may be damaged on the disk
            for entry in made.files:
                commits.check_file(folder, entry, pool)
        for file in sorted(entries[0].keys() | entries[1].keys()):
            pair = entries[0].get(file), entries[1].get(file)
            if (
                pair[0] is not None
                and pair[1] is not None
                and pair[0].tensors is None
                and file != TIMES
            ):
                found += _compare_texts((one, other), (pair[0], pair[1]))
        tensors, same = _compare_tensors((one, other), manifests, pool)
    missing = [
        ValueDifference(file, "", f"only in {one if file in entries[0] else other}")
        for file in sorted(entries[0].keys() ^ entries[1].keys())
        if (entries[0].get(file) or entries[1][file]).tensors is None
    ]
    return [*missing, *tensors, *found], same


Place = tuple[Entry, Piece]
Pair = tuple[Path, Path]


def _places(made: Manifest) -> dict[str, list[Place]]:
    """Map each tensor to its stored parts, in the order of their rows.

    The keys are equal in two checkpoints even if they store a tensor in different files: a weight
    that was frozen later is in a separate file, and each rank stores its own rows of a sharded
    weight.
    """
    found: dict[str, list[Place]] = {}
    for entry in made.files:
        for name, piece in (entry.tensors or {}).items():
            found.setdefault(f"{_kind(entry.name)}\n{name}", []).append((entry, piece))
    return {key: sorted(parts, key=lambda part: part[1].offset) for key, parts in found.items()}


def _kind(file: str) -> str:
    whole = manifest.file_of(file)
    return "model.safetensors" if whole.startswith("model-") else whole


def _compare_tensors(
    folders: Pair, manifests: tuple[Manifest, Manifest], pool: Executor
) -> tuple[list[ValueDifference], int]:
    ours, theirs = _places(manifests[0]), _places(manifests[1])
    found = []
    same = 0
    for key in sorted(ours.keys() | theirs.keys()):
        file, _, name = key.partition("\n")
        if key not in theirs or key not in ours:
            found.append(
                ValueDifference(file, name, f"only in {folders[0] if key in ours else folders[1]}")
            )
            continue
        mine, other = ours[key], theirs[key]
        one, two = mine[0][1], other[0][1]
        if [_content(piece) for _, piece in mine] == [_content(piece) for _, piece in other]:
            same += 1
        elif one.whole != two.whole:
            found.append(
                ValueDifference(file, name, f"shape {list(one.whole)} and {list(two.whole)}")
            )
        elif one.dtype != two.dtype:
            found.append(ValueDifference(file, name, f"dtype {one.dtype} and {two.dtype}"))
        else:
            values = [
                np.concatenate([read_tensor(folder, *part, name, pool) for part in parts])
                for folder, parts in zip(folders, (mine, other), strict=True)
            ]
            apart = _numbers(file, name, values[0], values[1], one.dtype)
            if apart.num_different:
                found.append(apart)
            else:  # equal values, divided into other parts
                same += 1
    return found, same


def _content(piece: Piece) -> tuple[object, ...]:
    return piece.dtype, piece.shape, piece.whole, piece.sha256


def read_tensor(
    folder: Path, entry: Entry, piece: Piece, name: str, pool: Executor
) -> npt.NDArray[Any]:
    """Read a tensor, or one of its stored parts, as a flat array and verify its digest.

    BF16 and FP8 values are returned as their bits, in unsigned integers (`as_numbers` converts
    them). The digest is computed without a copy of the data.

    Args:
        folder: folder of the checkpoint.
        entry: file that contains the tensor.
        piece: position, dtype and digest of the tensor or part.
        name: name of the tensor.
        pool: threads that compute the digest.

    Raises:
        RunFolderError: if the data are damaged.
    """
    held = bytearray(piece.num_bytes)
    with commits.open_file(folder, entry) as file:
        spans = commits.spans(
            len(commits.read_header(file, folder / entry.name, entry)), {name: piece}
        )
        found = digest.begin_read(pool, file, spans, {name: memoryview(held)}).finish()
    if found[name] != piece.sha256:
        raise RunFolderError(
            f"{folder / entry.name} is damaged: the digest of {name} does not match",
            hint="surefoot checkpoint check RUN",
        )
    return np.frombuffer(held, dtype=DTYPES[piece.dtype])


def as_numbers(stored: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Convert stored values to a dtype in which their differences are exact or nearly exact.

    `dtype` is the name of the stored dtype in safetensors.

    >>> as_numbers(np.array([0x3F80, 0xC000], dtype=np.uint16), "BF16").tolist()
    [1.0, -2.0]
    >>> as_numbers(np.array([0x38, 0xC0, 0x01], dtype=np.uint8), "F8_E4M3").tolist()
    [1.0, -2.0, 0.001953125]
    """
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "F8_E5M2":
        return (stored.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    if dtype == "F8_E4M3":
        return np.take(_E4M3, stored)
    if dtype == "C64":
        return stored.astype(np.complex128)
    return stored.astype(np.longdouble if dtype in ("I64", "U64") else np.float64)


def _e4m3() -> npt.NDArray[np.float64]:
    """Return the values of all 256 bit patterns of `torch.float8_e4m3fn`.

    The format has 4 exponent bits (bias 7), 3 mantissa bits and no infinity (arXiv:2209.05433).
    """
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    size[(bits & 127) == 127] = np.nan
    signed: npt.NDArray[np.float64] = np.where(bits >= 128, -size, size)
    return signed


_E4M3 = _e4m3()


def _numbers(
    file: str, name: str, one: npt.NDArray[Any], other: npt.NDArray[Any], dtype: str
) -> ValueDifference:
    different, largest = 0, None
    for start in range(0, len(one), BLOCK):
        a, b = one[start : start + BLOCK], other[start : start + BLOCK]
        unlike = np.flatnonzero(_as_bits(a) != _as_bits(b))
        different += len(unlike)
        apart = np.abs(as_numbers(a[unlike], dtype) - as_numbers(b[unlike], dtype))
        apart = apart[np.isfinite(apart)]
        if len(apart):
            largest = max(float(apart.max()), largest or 0.0)
    return ValueDifference(file, name, "values", different, len(one), largest)


def _as_bits(stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the bits of the values as unsigned integers.

    Compared by its bits, a NaN equals itself, and 0 differs from -0.
    """
    return stored.view(f"u{stored.dtype.itemsize}")


def _compare_texts(folders: Pair, pair: tuple[Entry, Entry]) -> list[ValueDifference]:
    """Return the differences between two checkpoints in a file that contains no tensors.

    For a JSON file, there is one difference per value, named by its path in the file.
    """
    if pair[0].sha256 == pair[1].sha256:
        return []
    name = pair[0].name
    try:
        trees = [json.loads(files.read_bytes(folder, name)) for folder in folders]
    except (ValueError, RecursionError):
        return [ValueDifference(name, "", "different bytes")]
    ours, theirs = dict(_leaves(trees[0])), dict(_leaves(trees[1]))
    return [
        _compare_leaves(name, path, ours, theirs)
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path, ...) != theirs.get(path, ...)
    ] or [ValueDifference(name, "", "different bytes")]


def _leaves(value: Any, path: str = "") -> Any:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list) and not _is_vector(value):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path}/{number}")
    else:
        yield path, value


def _is_vector(value: list[Any]) -> bool:
    """Return whether a list is compared as one value, such as the state of a random generator."""
    return len(value) >= MIN_VECTOR and not any(isinstance(each, dict | list) for each in value)


def _compare_leaves(
    file: str, path: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> ValueDifference:
    one, two = ours.get(path), theirs.get(path)
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        num_different = sum(a != b for a, b in zip(one, two, strict=True))
        return ValueDifference(file, path, "values", num_different, len(one))
    return ValueDifference(
        file, path, f"{_format_value(ours, path)} and {_format_value(theirs, path)}"
    )


def _format_value(leaves: dict[str, Any], path: str) -> str:
    return json.dumps(leaves[path])[:60] if path in leaves else "nothing"
