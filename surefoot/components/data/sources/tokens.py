"""Source of windows of a token stream, which is an array, a memory map or a file."""

# B batch, T tokens of a window

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.order import check_ids
from surefoot.components.data.sources.arrays import ArrayLike, open_npy, without_readahead
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError

IGNORED = -100  # a target that the loss ignores
HEADER_BYTES = 1024  # of llm.c
TOKEN_BYTES = {20240520: 2, 20240801: 4}  # magic number of the header -> bytes of a token
# of a longer stream, pieces are hashed: hashing 20 GB would take half a minute
WHOLE_BYTES = 64 << 20
PIECES, PIECE_TOKENS = 256, 2048


class Tokens:
    """Source of windows of `length` tokens of one stream, for next-token prediction.

    A batch is a dict of `inputs` (B, T) and `targets` (B, T), the next tokens, both int64. Every
    token except the first of the stream is a target exactly once. The last window is padded with
    input 0 and target -100.

    Args:
        ids: The stream, an array, tensor or memory map of integers.
        length: Tokens of a window (T).

    Raises:
        DataError: For a stream with fewer than two tokens or with a dtype that is not an integer,
            and for a length under 1. On reading, for negative tokens.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True
    IGNORED = IGNORED

    def __init__(self, ids: ArrayLike, length: int) -> None:
        self._ids = check_stream(ids)
        if length < 1:
            raise DataError(
                f"a window of {length} tokens is not possible", hint="use a length of 1 or more"
            )
        self._length = self.tokens_per_sample = length
        num_whole, left = divmod(len(self._ids) - 1, length)
        stride = self._ids.strides[0]
        self._windows = np.lib.stride_tricks.as_strided(
            self._ids, (num_whole, length + 1), (length * stride, stride), writeable=False
        )
        tail = to_int64(self._ids[num_whole * length :].copy()).numpy()
        self._last_inputs = np.pad(tail[:-1], (0, length - left))
        self._last_targets = np.pad(tail[1:], (0, length - left), constant_values=IGNORED)
        self.digest = digest_of(self._ids)

    def __len__(self) -> int:
        return -(-(len(self._ids) - 1) // self._length)

    def read(self, ids: np.ndarray) -> dict[str, Tensor]:
        ids = check_ids(ids, len(self))
        is_padded = ids >= len(self._windows)
        if not is_padded.any():
            windows = to_int64(self._windows[ids])
            return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}
        inputs, targets = (np.empty((len(ids), self._length), dtype=np.int64) for _ in range(2))
        inputs[is_padded], targets[is_padded] = self._last_inputs, self._last_targets
        whole = to_int64(self._windows[ids[~is_padded]]).numpy()
        inputs[~is_padded], targets[~is_padded] = whole[:, :-1], whole[:, 1:]
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}

    def describe(self) -> str:
        return f"{len(self._ids):,} tokens in {len(self):,} windows of {self._length}"


def check_stream(ids: ArrayLike) -> np.ndarray:
    """Return the tokens of a stream as a numpy array, without a copy if they are on the CPU.

    Raises DataError unless the stream has one dimension, an integer dtype, and two or more tokens.
    """
    array = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if array.ndim != 1 or len(array) < 2:
        raise DataError(
            f"a token stream of shape {array.shape} has nothing to predict",
            hint="give a 1-D array of 2 tokens or more",
        )
    if array.dtype.kind not in "iu":
        raise DataError(
            f"tokens of dtype {array.dtype} are not token ids",
            hint="give whole numbers: uint16, uint32, int32 or int64",
        )
    return array


def to_int64(tokens: np.ndarray) -> Tensor:
    """Return tokens as an int64 tensor.

    Raises DataError for negative tokens, for which an embedding would read outside its table.
    """
    wide = tokens.astype(np.int64, copy=False)
    if tokens.dtype.kind == "i" and wide.size and wide.min() < 0:
        raise DataError(
            f"the stream contains the token {wide.min()}",
            hint="token ids are 0 or more; check that the dtype is the one that was written",
        )
    return torch.from_numpy(wide)


def digest_of(ids: np.ndarray) -> str:
    """Return a SHA-256 (hex) that identifies a stream.

    Up to 64 MiB, it covers all tokens. Above, it covers the length, the dtype and 256 evenly spaced
    pieces, with the first and the last at the ends of the stream.
    """
    if ids.nbytes <= WHOLE_BYTES:
        return hashlib.sha256(np.ascontiguousarray(ids).data).hexdigest()
    digest = hashlib.sha256(f"{len(ids)} {ids.dtype.str}".encode())
    with without_readahead(ids):
        for start in np.linspace(0, len(ids) - PIECE_TOKENS, PIECES).astype(np.int64):
            digest.update(np.ascontiguousarray(ids[start : start + PIECE_TOKENS]).data)
    return digest.hexdigest()


def open_tokens(path: str | Path, dtype: str) -> np.ndarray:
    """Open a file of tokens as a memory map: .npy, or little-endian numbers of `dtype`.

    A file that llm.c or modded-nanogpt wrote begins with a header of 256 int32 numbers, which are
    no tokens: `write_datafile` in https://github.com/karpathy/llm.c, dev/data/data_common.py.
    Raises DataError for a dtype that is not an integer or not that of the header, and for a file
    that is missing or empty, or whose size does not fit the dtype or the header.
    """
    given = Path(path).expanduser()
    if given.suffix == ".npy":
        return open_npy(given)
    try:
        kind = np.dtype(dtype).newbyteorder("<")
    except TypeError:
        raise DataError(
            f"{dtype!r} is not a dtype", hint="use uint16, uint32, int32 or int64"
        ) from None
    if kind.kind not in "iu":
        raise DataError(
            f"tokens of dtype {kind} are not token ids", hint="use uint16, uint32, int32 or int64"
        )
    try:
        num_bytes = given.stat().st_size
        if (found := _read_header(given)) is not None:
            return _open_after_header(given, kind, num_bytes, *found)
        if num_bytes and num_bytes % kind.itemsize == 0:
            return np.memmap(given, dtype=kind, mode="r")
    except OSError as error:
        raise DataError(
            f"{given} cannot be read: {error.strerror}",
            hint="check the name, and your permission to read it",
        ) from None
    if num_bytes == 0:
        raise DataError(
            f"{given} is empty", hint="write its tokens first: ids.astype('uint16').tofile(path)"
        )
    raise DataError(
        (
            f"{given} has {num_bytes:,} bytes, which is not a multiple of the {kind.itemsize} "
            f"bytes of {kind.name}"
        ),
        hint="give the dtype that was written, or copy the file again",
    )


def _read_header(path: Path) -> tuple[int, int] | None:
    """Return the bytes of a token and the number of tokens by the header of llm.c, if any."""
    with path.open("rb") as file:
        start = file.read(12)
    if len(start) < 12:
        return None
    magic, _, count = struct.unpack("<3i", start)
    return (TOKEN_BYTES[magic], count) if magic in TOKEN_BYTES else None


def _open_after_header(
    path: Path, kind: np.dtype[Any], num_bytes: int, token_bytes: int, count: int
) -> np.ndarray:
    if kind.itemsize != token_bytes:
        name = {2: "uint16", 4: "uint32"}[token_bytes]
        raise DataError(
            f"{path} has a header that says {token_bytes} bytes a token, but dtype is {kind.name}",
            hint=f'give dtype="{name}"',
        )
    if count < 1 or num_bytes != HEADER_BYTES + count * token_bytes:
        raise DataError(
            f"{path} has {num_bytes:,} bytes, but its header says {count:,} tokens of "
            f"{token_bytes} bytes after {HEADER_BYTES:,} bytes",
            hint="copy the file again",
        )
    return np.memmap(path, dtype=kind, mode="r", offset=HEADER_BYTES)
