"""Encoding of a sample as members of a tar, each part in one of five formats.

The bytes depend neither on the machine nor on the time of writing.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor

from surefoot.components.data.tars.shards import BLOCK, MAX_MEMBER_BYTES
from surefoot.core.errors import DataError

KINDS = ("npy", "cls", "txt", "json", "safetensors")
END = bytes(2 * BLOCK)  # end of a tar
LARGEST_CLASS = 999_999_999  # 9 digits, as the readers allow
NUMBERS = "biufc"  # kinds of numeric dtypes in numpy
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


def extensions_of(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the extension of each part: its format, after its name where parts share a format.

    >>> extensions_of({"image": "npy", "label": "cls"}), extensions_of({"a": "npy", "b": "npy"})
    ({'image': 'npy', 'label': 'cls'}, {'a': 'a.npy', 'b': 'b.npy'})
    """
    counts = Counter(kinds.values())
    return {name: kind if counts[kind] == 1 else f"{name}.{kind}" for name, kind in kinds.items()}


def kind_of(value: Any) -> str:
    """Return the default format of a value.

    Integers are written as cls, arrays, floats and bools as npy, strings as txt, dicts of arrays as
    safetensors, everything else as json.
    """
    if isinstance(value, bool | float):
        return "npy"
    if isinstance(value, int | np.integer):
        return "cls"
    if isinstance(value, Tensor):
        is_whole = value.ndim == 0 and not (
            value.is_floating_point() or value.is_complex() or value.dtype is torch.bool
        )
        return "cls" if is_whole else "npy"
    if isinstance(value, np.ndarray | np.generic):
        return "cls" if value.ndim == 0 and value.dtype.kind in "iu" else "npy"
    if isinstance(value, str):
        return "txt"
    is_dict = isinstance(value, Mapping) and len(value) > 0
    return (
        "safetensors"
        if is_dict and all(isinstance(each, Tensor | np.ndarray) for each in value.values())
        else "json"
    )


def encode(value: Any, kind: str, what: str) -> bytes:
    """Encode a value in a format of `KINDS`; `what` names the value in errors.

    Raises DataError for a value that the format cannot hold.
    """
    content = _ENCODERS[kind](value, what)
    if len(content) > MAX_MEMBER_BYTES:
        raise DataError(
            f"{what} has {len(content):,} bytes as {kind}",
            hint=f"a part has at most {MAX_MEMBER_BYTES:,} bytes",
        )
    return content


def frame(key: str, parts: Mapping[str, bytes]) -> bytes:
    """Return the tar members of a sample, headers included, in ustar format (POSIX.1-1988).

    Owner and time are zero, so that equal samples are equal bytes.
    """
    pieces = []
    for extension, content in parts.items():
        member = tarfile.TarInfo(f"{key}.{extension}")
        member.size, member.mode, member.mtime = len(content), 0o644, 0
        pieces += [member.tobuf(tarfile.USTAR_FORMAT), content, bytes(-len(content) % BLOCK)]
    return b"".join(pieces)


def framed_bytes(sizes: list[int]) -> int:
    """Return the number of bytes that `frame` takes for parts of `sizes` bytes."""
    return sum(BLOCK + -(-size // BLOCK) * BLOCK for size in sizes)


def _array(value: Any, what: str) -> np.ndarray:
    if isinstance(value, Tensor):
        try:
            value = value.detach().cpu().numpy()
        except TypeError as error:  # bfloat16, float8
            raise DataError(
                f"{what} cannot be written: {error}", hint="give a dtype that NumPy has: x.float()"
            ) from None
    array = np.asarray(value, order="C")
    if array.dtype.kind not in NUMBERS:
        raise DataError(
            f"{what} is an array of {array.dtype}",
            hint="npy parts are numeric; write a string as txt or json",
        )
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _as_npy(value: Any, what: str) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, _array(value, what), allow_pickle=False)
    return file.getvalue()


def _as_class(value: Any, what: str) -> bytes:
    array = _array(value, what)
    if array.ndim or array.dtype.kind not in "iu" or not 0 <= int(array) <= LARGEST_CLASS:
        shown = (
            int(array)
            if not array.ndim and array.dtype.kind in "iu"
            else f"{array.dtype} {array.shape}"
        )
        name = what.partition(" ")[0]
        hint = (
            f"cls is a whole number from 0 to {LARGEST_CLASS:,}; for other values use --as "
            f"{name}=npy"
        )
        raise DataError(f"{what} is {shown}, which is not a class number", hint=hint)
    return str(int(array)).encode()


def _as_text(value: Any, what: str) -> bytes:
    if not isinstance(value, str):
        raise DataError(
            f"{what} is a {type(value).__name__}, not a string", hint="write it as json or npy"
        )
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} is not valid UTF-8: {error.reason} at {error.start}",
            hint="give text that can be encoded",
        ) from None


def _as_json(value: Any, what: str) -> bytes:
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{what} cannot be written as JSON: {error}",
            hint="give numbers, strings, lists and dicts of them",
        ) from None


def _plain(value: Any) -> Any:
    """Return an array as a list, and a mapping as a dict, for json."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


def _as_tensors(value: Any, what: str) -> bytes:
    if (
        not isinstance(value, Mapping)
        or not value
        or not all(isinstance(name, str) for name in value)
    ):
        raise DataError(
            f"{what} is a {type(value).__name__}",
            hint="safetensors parts are dicts of arrays by name",
        )
    held = {name: _array(each, f"{what}, its {name}") for name, each in value.items()}
    try:
        content: bytes = safetensors.numpy.save(
            {name: np.ascontiguousarray(held[name]) for name in sorted(held)}
        )
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise DataError(
            f"{what} cannot be written as safetensors: {error}", hint="write it as json or npy"
        ) from None
    return content


_ENCODERS = {
    "npy": _as_npy,
    "cls": _as_class,
    "txt": _as_text,
    "json": _as_json,
    "safetensors": _as_tensors,
}
