"""Source of texts of different lengths, padded to one of a few lengths.

Batches thus have few different shapes and little padding.
"""

# B batch, T tokens of the longest text of a batch, or the bound above it

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.order import check_ids
from surefoot.components.data.sources.arrays import ArrayLike, as_tensor
from surefoot.components.data.sources.packed import check_offsets, count_up
from surefoot.components.data.sources.tokens import IGNORED, check_stream, digest_of, to_int64
from surefoot.contract.task import Guarantee
from surefoot.core.errors import DataError

MIN_BOUND = 16


class Texts:
    """Source of the texts of one stream; each batch is padded to the smallest sufficient bound.

    A batch is a dict of int64 tensors:

    - `inputs` (B, T): token ids; 0 at padding.
    - `targets` (B, T): the next tokens; -100 at padding and at the last token of a text.
    - `lengths` (B,): the number of real tokens of each text.
    - `labels`: the labels, if given, in their own dtype.

    Args:
        ids: The stream, an array, tensor or memory map of integers.
        offsets: Start of each text, int64 (texts,) or (texts + 1,): text k is
            ids[offsets[k]:offsets[k + 1]]. `join_texts` returns the stream and the offsets.
        labels: One label per text.
        bounds: Lengths (T) to which batches are padded, increasing; by default the powers of two
            from 16, and the length of the longest text.
        together: Number of texts of similar length in a sample; `train.batch` counts such groups.
            The groups depend only on the lengths, so that the samples of any step can be computed
            directly.

    Raises:
        DataError: For offsets that do not increase, a text longer than the last bound, and labels
            that are not one per text.
    """

    guarantee: Guarantee = "proven"
    thread_safe = True

    def __init__(
        self,
        ids: ArrayLike,
        offsets: np.ndarray,
        *,
        labels: ArrayLike | None = None,
        bounds: Sequence[int] | None = None,
        together: int = 1,
    ) -> None:
        self._ids = check_stream(ids)
        whole = check_offsets(offsets, len(self._ids))
        self._starts, self._lengths = whole[:-1], np.diff(whole)
        self._labels = None if labels is None else as_tensor(labels)
        longest = int(self._lengths.max())
        self.bounds = _check_bounds(bounds, longest, int(self._lengths.argmax()))
        if self._labels is not None and (
            self._labels.ndim == 0 or len(self._labels) != len(self._lengths)
        ):
            raise DataError(
                f"labels of shape {tuple(self._labels.shape)} for {len(self._lengths):,} texts",
                hint="give one label for each text",
            )
        if together < 1:
            raise DataError(f"groups of {together} texts are not possible", hint="use 1 or more")
        self._together = together
        is_grouped = together > 1  # otherwise sample k is text k
        self._order = (
            np.argsort(self._lengths, kind="stable")
            if is_grouped
            else np.arange(len(self._lengths))
        )
        self.tokens_per_sample = len(self._ids) / len(self)
        digest = hashlib.sha256(f"texts {self.bounds} {together} {digest_of(self._ids)}".encode())
        digest.update(whole.data)
        if self._labels is not None:
            digest.update(np.ascontiguousarray(self._labels.numpy()).data)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return -(-len(self._lengths) // self._together)

    def read(self, ids: np.ndarray) -> dict[str, Tensor]:
        ids = check_ids(ids, len(self))
        places = (ids[:, None] * self._together + np.arange(self._together)).ravel()
        texts = self._order[places[places < len(self._order)]]
        lengths = self._lengths[texts]
        width = int(self._widths(lengths.max(initial=1)))
        within = count_up(lengths)
        rows = np.repeat(np.arange(len(texts)), lengths)
        tokens = to_int64(self._ids[np.repeat(self._starts[texts], lengths) + within])
        inputs, targets = (
            torch.zeros(len(texts), width, dtype=torch.int64),
            torch.full((len(texts), width), IGNORED),
        )
        inputs[torch.from_numpy(rows), torch.from_numpy(within)] = tokens
        has_before = torch.from_numpy(within > 0)
        targets[torch.from_numpy(rows)[has_before], torch.from_numpy(within - 1)[has_before]] = (
            tokens[has_before]
        )
        batch = {"inputs": inputs, "targets": targets, "lengths": torch.from_numpy(lengths)}
        return (
            batch
            if self._labels is None
            else {**batch, "labels": self._labels[torch.from_numpy(texts)]}
        )

    def efficiency(self, batch: int = 1) -> float:
        """Return the expected share of real tokens in batches of `batch` random samples.

        A batch is as wide as its widest sample. The probability that the widest of `batch` samples
        is at most w is the probability for one sample, to the power of `batch`.
        """
        first = np.arange(0, len(self._order), self._together)
        sizes = np.diff(np.append(first, len(self._order)))
        widths = self._widths(np.maximum.reduceat(self._lengths[self._order], first))
        kinds, which = np.unique(widths, return_inverse=True)
        at_most = np.cumsum(np.bincount(which, weights=sizes)) / len(self._order)
        widest = float(np.diff(at_most**batch, prepend=0.0) @ kinds)
        return len(self._ids) / (len(self._order) * widest)

    def describe(self) -> str:
        grouped = (
            f" in {len(self):,} groups of {self._together} texts of similar length"
            if self._together > 1
            else ""
        )
        return (
            f"{len(self._lengths):,} texts of {self._lengths.min()} to "
            f"{self._lengths.max()} tokens{grouped}, padded to "
            f"{', '.join(map(str, self.bounds))}: without padding are "
            f"{self.efficiency():.0%} of the tokens of a sample, and about "
            f"{self.efficiency(32):.0%} of those of a batch of 32 samples"
        )

    def _widths(self, lengths: np.ndarray) -> np.ndarray:
        bounds = np.array(self.bounds)
        widths: np.ndarray = bounds[np.searchsorted(bounds, lengths)]
        return widths


def join_texts(texts: Sequence[ArrayLike | Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate texts into one stream; return it and its offsets, for `Texts` and `Packed`.

    Raises:
        DataError: For a text that is empty or does not consist of token ids.

    >>> ids, offsets = join_texts([[5, 6], [7, 8, 9]])
    >>> ids.tolist(), offsets.tolist()
    ([5, 6, 7, 8, 9], [0, 2, 5])
    """
    if not len(texts):
        raise DataError("there is no text in the list", hint="give 1 or more")
    arrays = [np.asarray(text) for text in texts]
    for number, array in enumerate(arrays):
        if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
            raise DataError(
                f"text {number} is {array.dtype} of shape {array.shape}, not a row of token ids",
                hint="give a 1-D array of whole numbers; leave empty texts out",
            )
    return np.concatenate(arrays), np.append(0, np.cumsum([len(array) for array in arrays]))


def _check_bounds(bounds: Sequence[int] | None, longest: int, which: int) -> tuple[int, ...]:
    if bounds is None:
        powers = (1 << power for power in range(MIN_BOUND.bit_length() - 1, longest.bit_length()))
        return (*(power for power in powers if power < longest), longest)
    if not len(bounds) or min(bounds) < 1 or list(bounds) != sorted(set(bounds)):
        raise DataError(
            f"bounds {tuple(bounds)} are not possible",
            hint="pass increasing lengths, such as (64, 128, 256)",
        )
    if bounds[-1] < longest:
        raise DataError(
            f"text {which:,} has {longest:,} tokens, but the last bound is {bounds[-1]:,}",
            hint="add a bound, or cut longer texts",
        )
    return tuple(bounds)
