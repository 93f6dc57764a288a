"""An order for samples that lie in shards: it stays in a few shards at a time, and is as much pure arithmetic as the full permutation.

Two levels: the shards are permuted, every `window` of them in that order make a block, and the samples of a block are permuted. So a
reader needs the shards of one block at hand, and may fetch those of the next meanwhile. What it costs is told by `measure_mixing`:
neighbours in the order lie in one shard about once in `window` times, where the full permutation has them so once in all shards.
"""

# S shards, N samples

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from surefoot.components.data.order import LARGEST, Permutation, derive
from surefoot.core.errors import DataError

MOST_KEPT = 4  # permutations of blocks: a batch lies in one or two


@final
class BlockShuffle:
    """A seekable order of the samples of shards that hold `sizes`, numbered through: any position is found in O(log S).

    It is called like `Permutation`, and is one: each sample comes once. `window` 1 reads shard after shard, each mixed in itself; as
    many as there are shards is a full permutation. Another key gives another order. Raises DataError for empty shards, and a window
    under 1.

    >>> BlockShuffle([2, 2, 2], key=0, window=1)(np.arange(6)).tolist()
    [1, 0, 3, 2, 5, 4]
    """

    def __init__(self, sizes: Sequence[int], key: int, window: int) -> None:
        counts = np.asarray(sizes, dtype=np.int64)
        if counts.ndim != 1 or not len(counts) or counts.min() < 1 or counts.sum() > LARGEST:
            raise DataError(
                f"shards of {list(sizes)[:8]} samples cannot be ordered", hint=f"give 1 or more each, {LARGEST} in all"
            )
        if window < 1:
            raise DataError(f"a window of {window} shards is none", hint="give 1 or more; more mixes better, and needs more room")
        self.n, self.window, self._key = int(counts.sum()), window, key
        self.shards = Permutation(len(counts), derive(key, 1))(np.arange(len(counts)))  # in the order in which they are read
        self._ends = np.cumsum(counts[self.shards])
        self._shift = (np.cumsum(counts) - counts)[self.shards] - (self._ends - counts[self.shards])  # from place to sample
        lasts = np.minimum(np.arange(window, len(counts) + window, window), len(counts)) - 1
        self._block_ends = self._ends[lasts]
        self._mixed: dict[int, Permutation] = {}

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The samples (int64) that stand at `positions` (int64 in [0, n)), same shape."""
        flat = positions.astype(np.int64).ravel()
        blocks = np.searchsorted(self._block_ends, flat, side="right")
        places = np.empty_like(flat)
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            begin = int(self._block_ends[block - 1]) if block else 0
            places[chosen] = begin + self._mix(block, int(self._block_ends[block]) - begin)(flat[chosen] - begin)
        samples: np.ndarray = places + self._shift[np.searchsorted(self._ends, places, side="right")]
        return samples.reshape(positions.shape)

    def blocks(self) -> list[list[int]]:
        """The shards of each block, in order: what must be at hand together."""
        return [self.shards[start : start + self.window].tolist() for start in range(0, len(self.shards), self.window)]

    def look_ahead_bytes(self, num_bytes: Sequence[int]) -> tuple[int, int]:
        """Of shards of so many bytes, the most that must be at hand; and with the next block fetched meanwhile."""
        held = [sum(num_bytes[shard] for shard in block) for block in self.blocks()]
        return max(held), max(one + other for one, other in zip(held, [*held[1:], 0], strict=True))

    def _mix(self, block: int, size: int) -> Permutation:
        mixed = self._mixed.get(block)
        if mixed is None:
            mixed = Permutation(size, derive(self._key, 2, block))
            kept = {**self._mixed, block: mixed}  # a new dict: another thread may read the old one
            self._mixed = dict(list(kept.items())[-MOST_KEPT:])
        return mixed


@dataclass(frozen=True)
class Order:
    """The order of a whole run: every epoch its own permutation of `n` samples, or 0..n-1 when not shuffled.

    With a `window` it is a `BlockShuffle` of runs of `chunk` samples, so many of them at a time.
    """

    n: int
    seed: int
    shuffle: bool = True
    chunk: int = 0
    window: int = 0

    def permutation(self, epoch: int) -> Permutation | BlockShuffle | None:
        """Called with positions of `epoch` it gives their samples; None where nothing is shuffled."""
        if not self.shuffle:
            return None
        key = derive(self.seed, 1, epoch)
        if not self.window:
            return Permutation(self.n, key)
        whole, rest = divmod(self.n, self.chunk)
        return BlockShuffle([self.chunk] * whole + [rest] * bool(rest), key, self.window)

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The samples at positions start..stop-1 of `epoch`, int64."""
        positions = np.arange(start, stop, dtype=np.int64)
        permutation = self.permutation(epoch)
        return positions if permutation is None else permutation(positions)

    def chunks(self, epoch: int) -> np.ndarray:
        """The first and the last sample of each chunk, (chunks, 2), in the order in which an epoch comes to them."""
        permutation = self.permutation(epoch)
        assert isinstance(permutation, BlockShuffle)
        first = permutation.shards * self.chunk
        return np.stack([first, np.minimum(first + self.chunk, self.n) - 1], axis=1)


@dataclass(frozen=True)
class Mixing:
    """How well an order mixes; a full permutation of many samples has 1, 0 and 1 / shards.

    `displacement`: mean distance of a sample from where it lies, over that of the full permutation. `correlation`: of the numbers of
    neighbours. `same_shard`: the part of neighbours that lie in one shard, about 1 / window.
    """

    displacement: float
    correlation: float
    same_shard: float


def measure_mixing(samples: np.ndarray, sizes: Sequence[int]) -> Mixing:
    """What a whole order, (N,) int64, does to the samples of shards that hold `sizes`. Raises DataError for fewer than 3 samples."""
    count = len(samples)
    if count < 3 or count != sum(sizes):
        raise DataError(f"{count} samples of {sum(sizes)} cannot be measured", hint="give the whole order, of 3 samples or more")
    shards = np.searchsorted(np.cumsum(sizes), samples, side="right")
    distance = np.abs(samples - np.arange(count)).mean() / ((count * count - 1) / (3 * count))
    correlation = np.corrcoef(samples[:-1], samples[1:])[0, 1]
    return Mixing(float(distance), float(correlation), float((shards[:-1] == shards[1:]).mean()))
