"""Check whether a collate function returns the same for two microbatches as for both at once."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor

from surefoot.components.data.feed import Feed
from surefoot.components.data.in_place import find_arrays
from surefoot.components.data.loader.streams import streams_of
from surefoot.components.data.order import derive
from surefoot.components.data.sources.batch_digest import digest_of
from surefoot.components.data.sources.wrapped import TorchDataset
from surefoot.contract.task import Batch
from surefoot.train.failure.blame import describe
from surefoot.train.preflight.samples import is_joined_tensor
from surefoot.train.quiet import read_streams

MAX_SAMPLES = 4  # of each microbatch
UNCHECKED = (
    "whether the collate function returns the same for parts of a batch could not be checked"
)
DRAWS = (
    "__getitems__ of the dataset returns other values for a sample if it reads others with it: "
    "random numbers that it draws depend on the microbatch, and change with train.microbatch and "
    "the number of ranks"
)
WARNING = (
    "the collate function returns other values for two microbatches than for their samples "
    "together, in more than padding: the run trains on what it returns for each microbatch of "
    "{sizes} samples, which differs from whole batches"
)


class CutByNumber:
    """Samples of the microbatches of the first step of a dataset, for `check`."""

    def __init__(self, feed: Feed, seed: int) -> None:
        window, self._source = feed.window(0), cast(TorchDataset, feed.source)
        self._cut, self._key = feed.microbatches(window), derive(seed, window.epoch)

    def samples_of(self, part: int, end: int, start: int = 0) -> list[Any]:
        ids = self._cut[part][start:end].tolist() if part < len(self._cut) else []
        return self._source.samples_of(ids, self._key) if ids else []

    def collate(self, samples: list[Any]) -> Batch:
        return self._source.collate(samples, list(range(len(samples))))

    def describe_sizes(self) -> str:
        return " or ".join(map(str, sorted({len(part) for part in self._cut})))


def check(source: Any) -> list[str]:
    """Return a warning if whole batches contain something else than their microbatches.

    `source` is a `DealtLoader` or a `CutByNumber`. Padding may differ. A function that draws random
    numbers, as for masks, is not compared.
    """
    with streams_of(0):
        try:
            parts = [source.samples_of(part, MAX_SAMPLES) for part in range(2)]
            if not all(parts):
                return []
            together = digest_of(parts[0][1:2])
            alone, again = (digest_of(source.samples_of(0, 2, 1)) for _ in range(2))
            if alone == again != together:
                return [DRAWS]
            before = read_streams()
            whole, *halves = [
                list(find_arrays(source.collate(copy.deepcopy(samples))))
                for samples in (parts[0] + parts[1], *parts)
            ]
            if read_streams() != before:
                return []
        except Exception as error:  # noqa: BLE001 - of the user's function
            return [f"{UNCHECKED}: {describe(error)}"]
    if _is_joined(whole, *halves):
        return []
    return [WARNING.format(sizes=source.describe_sizes())]


def _is_joined(whole: list[Any], first: list[Any], second: list[Any]) -> bool:
    """Return whether the tensors of a batch are those of its two parts, except for padding."""
    if len(whole) == len(first) == len(second):
        return all(
            is_joined_tensor(*tensors) or _is_padded(*tensors)
            for tensors in (
                [torch.as_tensor(each) for each in row]
                for row in zip(whole, first, second, strict=True)
            )
        )
    # one tensor for each sample, as of images of several sizes
    return Counter(map(digest_of, whole)) == Counter(map(digest_of, [*first, *second]))


def _is_padded(whole: Tensor, first: Tensor, second: Tensor) -> bool:
    """Return whether `whole` has the rows of two tensors, padded at their beginnings or ends."""
    if not whole.ndim == first.ndim == second.ndim or not whole.ndim:
        return False
    if whole.shape[0] != first.shape[0] + second.shape[0]:
        return False
    rows = whole[: first.shape[0]], whole[first.shape[0] :]
    return any(
        all(_holds(*pair, at_end=at_end) for pair in zip(rows, (first, second), strict=True))
        for at_end in (False, True)
    )


def _holds(rows: Tensor, part: Tensor, *, at_end: bool) -> bool:
    sizes = list(zip(rows.shape, part.shape, strict=True))
    if any(large < small for large, small in sizes):
        return False
    region = tuple(slice(large - small, None) if at_end else slice(small) for large, small in sizes)
    is_padding = torch.ones(rows.shape, dtype=torch.bool)
    is_padding[region] = False
    padding = rows[is_padding]
    return torch.equal(rows[region], part) and bool((padding == padding[:1]).all())
