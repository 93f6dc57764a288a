"""Packing of whole documents into rows of one length, and the mask that separates them.

The packing is best-fit decreasing over the histogram of lengths (M. Krell et al., "Efficient
Sequence Packing without Cross-contamination", 2021). It uses only the number of documents of each
length. Its time therefore depends on the length of a row, and hardly on the number of documents.
"""

# B batch, T tokens of a row, N pieces of documents, R rows

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.mixture import Concat
from surefoot.components.data.order import check_ids
from surefoot.components.data.sources.arrays import ArrayLike, open_npy
from surefoot.components.data.sources.tokens import (
    IGNORED,
    Tokens,
    check_stream,
    digest_of,
    open_tokens,
    to_int64,
)
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError
from surefoot.core.place import find_files

SCAN_TOKENS = 1 << 24  # of a memory map at a time, to find the ends of documents
NO_DOCUMENT = -1  # document index of padding


class Packed:
    """Source of rows of `length` tokens, into which the documents of a stream are packed.

    A batch is a dict of four int64 tensors (B, T):

    - `inputs`: token ids; 0 at padding.
    - `targets`: the next tokens; -100 at padding and at the last token of a document.
    - `positions`: position of each token in its document (or piece), from 0; 0 at padding.
    - `documents`: index of the document (or piece) in its row; -1 at padding. `block_diagonal`
      makes the attention mask from these indices.

    A document longer than a row is split into pieces that do not attend to each other. Still, every
    token except the first of a document is a target once. Documents of one token are left out,
    since they contain nothing to predict.

    Args:
        ids: The stream, an array, tensor or memory map of integers.
        offsets: Start of each document, int64 (documents,) or (documents + 1,): document k is
            ids[offsets[k]:offsets[k + 1]]. `find_documents` returns them.
        length: Tokens of a row (T).

    Raises:
        DataError: If the offsets do not increase from 0 to the end of the stream, if the length is
            under 1, or if no document has 2 tokens.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True

    def __init__(self, ids: ArrayLike, offsets: np.ndarray, length: int) -> None:
        self._ids, self._length = check_stream(ids), length
        if length < 1:
            raise DataError(
                f"a row of {length} tokens is not possible", hint="use a length of 1 or more"
            )
        offsets = check_offsets(offsets, len(self._ids))
        starts, lengths, is_end = _cut(offsets, length)
        if not len(starts):
            raise DataError(
                f"{len(offsets) - 1:,} documents of one token each have nothing to predict",
                hint="check the end token",
            )
        order, self._rows = pack(lengths, length)
        self._starts, self._lengths, self._is_end = (
            starts[order],
            lengths[order].astype(np.int64),
            is_end[order],
        )
        self.num_documents, self.num_tokens = len(offsets) - 1, int(lengths.sum())
        self.tokens_per_sample = self.num_tokens / len(self)
        digest = hashlib.sha256(f"packed {length} {digest_of(self._ids)}".encode())
        digest.update(offsets.data)
        self.digest = digest.hexdigest()

    @property
    def efficiency(self) -> float:
        """Share of real tokens, which are not padding, among all tokens of the rows."""
        return self.num_tokens / (len(self) * self._length)

    def __len__(self) -> int:
        return len(self._rows) - 1

    def read(self, ids: np.ndarray) -> dict[str, Tensor]:
        ids = check_ids(ids, len(self))
        first, count = self._rows[ids], self._rows[ids + 1] - self._rows[ids]
        within = count_up(count)  # index of each piece in its row
        pieces = np.repeat(first, count) + within
        lengths = self._lengths[pieces]
        positions = count_up(lengths)
        places = positions + np.repeat(
            _places(lengths, within, np.repeat(np.arange(len(ids)), count) * self._length), lengths
        )
        tokens = positions + np.repeat(self._starts[pieces], lengths)
        targets = to_int64(self._ids[np.minimum(tokens + 1, len(self._ids) - 1)])
        targets[torch.from_numpy(np.cumsum(lengths)[self._is_end[pieces]] - 1)] = IGNORED
        filled = {
            "inputs": (to_int64(self._ids[tokens]), 0),
            "targets": (targets, IGNORED),
            "positions": (torch.from_numpy(positions), 0),
            "documents": (torch.from_numpy(np.repeat(within, lengths)), NO_DOCUMENT),
        }
        where = torch.from_numpy(places)
        return {
            name: torch.full((len(ids) * self._length,), padding)
            .scatter_(0, where, values)
            .view(len(ids), self._length)
            for name, (values, padding) in filled.items()
        }

    def describe(self) -> str:
        return (
            f"{self.num_tokens:,} tokens of {self.num_documents:,} documents packed into "
            f"{len(self):,} rows of {self._length}: {self.efficiency:.2%} of their tokens are real"
        )


class TokenFile:
    """Source of windows of the tokens in memory-mapped files: `TokenFile("train_*.bin", 1024)`.

    The windows are like those of `Tokens`, and none has tokens of two files. With `end` or
    `offsets`, whole documents are packed into rows instead, as `Packed` does.

    Args:
        path: The file: .npy, or little-endian numbers of `dtype`, after the header of llm.c if the
            file has one. Several files are a list, or a pattern, and are read in that order, or in
            that of their names.
        length: Tokens of a window or row (T).
        dtype: Integer dtype of a file that is not .npy.
        end: Token that ends each document; the file is read once to find the documents.
        offsets: File of the positions at which documents begin: .npy, or raw int64. Several token
            files have one each. `find_documents` returns offsets that can be stored.

    Raises:
        DataError: For files in other formats, and if both `end` and `offsets` are given.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        length: int,
        *,
        dtype: str = "uint16",
        end: int | None = None,
        offsets: str | Path | Sequence[str | Path] | None = None,
    ) -> None:
        if end is not None and offsets is not None:
            raise DataError(
                "TokenFile got both an end token and offsets", hint="give one of the two"
            )
        self.paths = find_files(path)
        starts = find_files(offsets) if offsets else None
        self._again = partial(TokenFile, length=length, dtype=dtype, end=end, offsets=starts)
        if not self.paths or len(starts or self.paths) != len(self.paths):
            raise DataError(
                f"TokenFile got {len(self.paths)} token files and {len(starts or ())} files of "
                "offsets",
                hint="give one token file or more, and as many files of offsets, or none",
            )
        sources: list[Packed | Tokens] = []
        for number, each in enumerate(self.paths):
            ids = open_tokens(each, dtype)
            if end is not None:
                sources.append(Packed(ids, find_documents(ids, end), length))
            elif starts is not None:
                sources.append(Packed(ids, _open_offsets(starts[number]), length))
            else:
                sources.append(Tokens(ids, length))
        self._source: Any = sources[0] if len(sources) == 1 else Concat(sources)
        self.digest, self.tokens_per_sample = self._source.digest, self._source.tokens_per_sample

    def __len__(self) -> int:
        return len(self._source)

    def read(self, ids: np.ndarray) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = self._source.read(ids)
        return batch

    def describe(self) -> str:
        return f"{self.paths[0].name}: {self._source.describe()}"

    def __reduce__(self) -> tuple[Any, ...]:  # another process maps the file itself
        return self._again, (self.paths,)


def block_diagonal(documents_BT: Tensor) -> Tensor:
    """Return a causal mask that separates documents, for `scaled_dot_product_attention`.

    Padding attends to padding, because a row of the mask without any True would give NaN.

    Args:
        documents_BT: Index of the document of each token, as `Packed` returns it, (B, T) int64.

    Returns:
        The mask, bool (B, 1, T, T): True where a token attends to an earlier token of its document,
            or to itself.

    >>> block_diagonal(torch.tensor([[0, 0, 1]])).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril()[:, None]


def find_documents(ids: ArrayLike, end: int) -> np.ndarray:
    """Return the offsets of the documents in a stream of tokens.

    Args:
        ids: The stream, an array, tensor or memory map of integers.
        end: Token that ends each document; it is the last token of the document.

    Returns:
        The start of each document, and the end of the last one, int64 (documents + 1,).

    Raises:
        DataError: If `end` is not in the stream.

    >>> find_documents(np.array([5, 6, 0, 7, 0, 8]), end=0).tolist()
    [0, 3, 5, 6]
    """
    tokens = check_stream(ids)
    ends = [
        np.flatnonzero(tokens[start : start + SCAN_TOKENS] == end) + start + 1
        for start in range(0, len(tokens), SCAN_TOKENS)
    ]
    found = np.concatenate(ends)
    if not len(found):
        raise DataError(
            f"the token {end} does not occur among the {len(tokens):,} tokens of the stream",
            hint="pass the token that ends a document",
        )
    return np.concatenate(([0], found, [len(tokens)] if found[-1] < len(tokens) else [])).astype(
        np.int64
    )


def check_offsets(offsets: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the offsets as contiguous int64; append the end of the stream if it is missing.

    Raises DataError for invalid offsets.
    """
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
        raise DataError(
            f"offsets must be a 1-D int64 array; got {offsets.dtype} of shape {offsets.shape}",
            hint="pass the index of the first token of each document",
        )
    whole = np.ascontiguousarray(offsets, dtype=np.int64)
    if whole[-1] < num_tokens:
        whole = np.append(whole, num_tokens)
    wrong = np.flatnonzero(np.diff(whole) <= 0)
    if len(wrong):
        at = int(wrong[0])
        raise DataError(
            f"document {at:,} begins at token {whole[at]:,} and ends at {whole[at + 1]:,}",
            hint="give offsets that increase by 1 or more",
        )
    if whole[0] != 0 or whole[-1] != num_tokens:
        raise DataError(
            f"the offsets go from {whole[0]:,} to {whole[-1]:,}, "
            f"the stream has {num_tokens:,} tokens",
            hint="the first offset is 0, and the last at most the number of tokens",
        )
    return whole


@dataclass(frozen=True)
class RowGroup:
    """Group of rows whose pieces have the same lengths.

    `rows` is the number of rows; `runs` has (length, count) for the pieces in each row.
    """

    rows: int
    runs: tuple[tuple[int, int], ...] = ()

    def make_full_rows(self, rows: int, length: int, count: int) -> RowGroup:
        return RowGroup(rows, (*self.runs, (length, count)))


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign pieces of 1 to `capacity` tokens to rows.

    Returns the indices of the pieces, row after row (N,), and the range of each row in this array
    (R + 1,). The longest pieces are assigned first, each to the fullest row that has space for it.
    Pieces of equal length stay in order. The result depends only on the lengths.

    >>> order, rows = pack(np.array([3, 5, 2, 6]), 8)
    >>> [order[rows[i] : rows[i + 1]].tolist() for i in range(len(rows) - 1)]
    [[1, 0], [3, 2]]
    """
    counts = np.bincount(lengths, minlength=capacity + 1)
    order = np.argsort(capacity - lengths.astype(np.int32), kind="stable")
    # length -> start of its pieces in `order`
    first = dict(enumerate((len(lengths) - np.cumsum(counts)).tolist()))
    parts, sizes = [], []
    for group in _pack_histogram(counts, capacity):
        columns = []
        for length, count in group.runs:
            columns.append(
                order[first[length] : first[length] + group.rows * count].reshape(group.rows, count)
            )
            first[length] += group.rows * count
        parts.append(np.hstack(columns))
        sizes.append(np.full(group.rows, parts[-1].shape[1]))
    return np.concatenate([part.ravel() for part in parts]), np.concatenate(
        ([0], np.cumsum(np.concatenate(sizes)))
    )


def _pack_histogram(counts: np.ndarray, capacity: int) -> list[RowGroup]:
    """Return the rows of best-fit decreasing, computed for all pieces of one length at a time.

    `counts` has the number of pieces of each length. Pieces of equal length fill a row until no
    more of them fit.
    """
    open_rows: dict[int, list[RowGroup]] = {}  # by the space that is left
    spaces: list[int] = []  # the keys of open_rows, sorted

    def put(space: int, group: RowGroup) -> None:
        if space not in open_rows:
            bisect.insort(spaces, space)
        open_rows.setdefault(space, []).append(group)

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            at = bisect.bisect_left(spaces, length)
            space = spaces[at] if at < len(spaces) else capacity
            group = (
                open_rows[space].pop()
                if at < len(spaces)
                else RowGroup(-(-left // (capacity // length)))
            )
            if at < len(spaces) and not open_rows[space]:
                del open_rows[space], spaces[at]
            each = space // length
            full = min(group.rows, left // each)
            # pieces that fill one more row in part
            rest = left - full * each if full < group.rows else 0
            if full:
                put(space - each * length, group.make_full_rows(full, length, each))
            if rest:
                put(space - rest * length, group.make_full_rows(1, length, rest))
            if group.rows > full + (rest > 0):
                put(space, RowGroup(group.rows - full - (rest > 0), group.runs))
            left -= full * each + rest
    return [group for space in spaces for group in open_rows[space]]


def _cut(offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split documents into pieces of at most `length` tokens.

    Returns start and length of each piece, and whether its document ends with it. Pieces without
    anything to predict are left out.
    """
    counts = -(-(np.diff(offsets) - 1) // length)
    starts = np.repeat(offsets[:-1], counts) + length * count_up(counts)
    stops = np.repeat(offsets[1:], counts)
    lengths = np.minimum(stops - starts, length)
    return starts, lengths, np.equal(starts + lengths, stops)


def count_up(counts: np.ndarray) -> np.ndarray:
    """Concatenate the ranges from 0 to each count - 1: [2, 3] gives [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    counted: np.ndarray = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return counted


def _places(lengths: np.ndarray, within: np.ndarray, row_starts: np.ndarray) -> np.ndarray:
    """Return the position in the flattened batch at which each piece begins.

    It is the start of the row plus the lengths of the earlier pieces in the row.
    """
    before = np.cumsum(lengths) - lengths
    firsts = np.flatnonzero(within == 0)
    places: np.ndarray = (
        row_starts + before - np.repeat(before[firsts], np.diff(np.append(firsts, len(within))))
    )
    return places


def _open_offsets(path: str | Path) -> np.ndarray:
    return open_npy(path) if Path(path).suffix == ".npy" else open_tokens(path, "int64")
