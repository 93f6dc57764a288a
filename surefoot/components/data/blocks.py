"""Shuffled order of samples in shards, which needs only a few shards at a time.

Like the full permutation, the order is a pure function of seed and position. It has two levels. The
shards are permuted, and each `window` consecutive shards form a block. Then the samples of each
block are permuted. A reader needs only the shards of one block, and can download those of the next
block in the meantime. The cost is weaker mixing, which `measure_mixing` measures: two adjacent
samples are from the same shard with a probability of about 1 / window, instead of 1 / number of
shards.
"""

# S shards, N samples

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from surefoot.components.data.order import LARGEST, Permutation, derive
from surefoot.core.errors import DataError

MAX_CACHED = 4  # cached permutations of blocks: a batch spans one or two


@final
class BlockShuffle:
    """Shuffled order of the samples in S shards, which looks up any position in O(log S).

    Call the object with positions, like a `Permutation`: it returns the samples at these positions.
    Samples are numbered consecutively from shard to shard, and each occurs once.

    Args:
        sizes: Number of samples of each of the S shards.
        key: Seed of the order.
        window: Number of shards that are mixed at a time. With 1, the shards are read one after the
            other, and only the samples inside each shard are shuffled; with S, the order is a full
            permutation.

    Raises:
        DataError: If a shard is empty, or if the window is under 1.

    >>> BlockShuffle([2, 2, 2], key=0, window=1)(np.arange(6)).tolist()
    [1, 0, 3, 2, 5, 4]
    """

    def __init__(self, sizes: Sequence[int], key: int, window: int) -> None:
        counts = np.asarray(sizes, dtype=np.int64)
        if counts.ndim != 1 or not len(counts) or counts.min() < 1 or counts.sum() > LARGEST:
            raise DataError(
                f"shards of {list(sizes)[:8]} samples cannot be shuffled",
                hint=f"give 1 or more each, {LARGEST} in all",
            )
        if window < 1:
            raise DataError(
                f"a window of {window} shards is not possible",
                hint="give 1 or more; a larger window shuffles better and needs more memory",
            )
        self.n, self.window, self._key = int(counts.sum()), window, key
        # in the order in which they are read
        self.shards = Permutation(len(counts), derive(key, 1))(np.arange(len(counts)))
        self._ends = np.cumsum(counts[self.shards])
        # position to sample
        self._shift = (np.cumsum(counts) - counts)[self.shards] - (self._ends - counts[self.shards])
        lasts = np.minimum(np.arange(window, len(counts) + window, window), len(counts)) - 1
        self._block_ends = self._ends[lasts]
        self._mixed: dict[int, Permutation] = {}

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples (int64) at `positions` (int64 in [0, n)), in the same shape."""
        flat = positions.astype(np.int64).ravel()
        blocks = np.searchsorted(self._block_ends, flat, side="right")
        places = np.empty_like(flat)
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            begin = int(self._block_ends[block - 1]) if block else 0
            places[chosen] = begin + self._mix(block, int(self._block_ends[block]) - begin)(
                flat[chosen] - begin
            )
        samples: np.ndarray = (
            places + self._shift[np.searchsorted(self._ends, places, side="right")]
        )
        return samples.reshape(positions.shape)

    def blocks(self) -> list[list[int]]:
        """Return the shards of each block, in reading order.

        A reader needs all shards of a block at the same time.
        """
        return [
            self.shards[start : start + self.window].tolist()
            for start in range(0, len(self.shards), self.window)
        ]

    def look_ahead_bytes(self, num_bytes: Sequence[int]) -> tuple[int, int]:
        """Return the maximum bytes of one block, and of two consecutive blocks.

        The second number is needed if the next block is downloaded in advance. `num_bytes` has the
        size of each shard.
        """
        held = [sum(num_bytes[shard] for shard in block) for block in self.blocks()]
        return max(held), max(one + other for one, other in zip(held, [*held[1:], 0], strict=True))

    def _mix(self, block: int, size: int) -> Permutation:
        mixed = self._mixed.get(block)
        if mixed is None:
            mixed = Permutation(size, derive(self._key, 2, block))
            kept = {**self._mixed, block: mixed}  # a new dict: another thread may read the old one
            self._mixed = dict(list(kept.items())[-MAX_CACHED:])
        return mixed


@dataclass(frozen=True)
class Order:
    """Sample order of a run: a new permutation of `n` samples in each epoch.

    Args:
        n: Number of samples.
        seed: Seed of the permutations.
        shuffle: False for the order 0..n-1 in each epoch.
        chunk: Number of consecutive samples in a chunk. A `BlockShuffle` uses chunks as its shards.
        window: Number of chunks that are mixed at a time; 0 for a full permutation.
    """

    n: int
    seed: int
    shuffle: bool = True
    chunk: int = 0
    window: int = 0

    def permutation(self, epoch: int) -> Permutation | BlockShuffle | None:
        """Return a function from positions in `epoch` to samples; None without shuffling."""
        if not self.shuffle:
            return None
        key = derive(self.seed, 1, epoch)
        if not self.window:
            return Permutation(self.n, key)
        whole, rest = divmod(self.n, self.chunk)
        return BlockShuffle([self.chunk] * whole + [rest] * bool(rest), key, self.window)

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the samples at positions start..stop-1 of `epoch`, int64."""
        positions = np.arange(start, stop, dtype=np.int64)
        permutation = self.permutation(epoch)
        return positions if permutation is None else permutation(positions)

    def chunks(self, epoch: int) -> np.ndarray:
        """Return the first and last sample of each chunk, (chunks, 2), in reading order.

        The order must be shuffled and have a `window`.
        """
        permutation = self.permutation(epoch)
        assert isinstance(permutation, BlockShuffle)
        first = permutation.shards * self.chunk
        return np.stack([first, np.minimum(first + self.chunk, self.n) - 1], axis=1)


@dataclass(frozen=True)
class Mixing:
    """Measures of how well an order mixes the samples of shards.

    `displacement` is the mean distance between the position and the number of a sample, relative to
    that of the full permutation. `correlation` is that of the numbers of adjacent samples.
    `same_shard` is the share of adjacent samples that are in the same shard, about 1 / window. A
    full permutation of many samples has 1, 0 and 1 / shards.
    """

    displacement: float
    correlation: float
    same_shard: float


def measure_mixing(samples: np.ndarray, sizes: Sequence[int]) -> Mixing:
    """Measure how well an order mixes the samples of shards.

    Args:
        samples: The samples in the order in which they are read, (N,) int64.
        sizes: Number of samples of each shard.

    Raises:
        DataError: If there are fewer than 3 samples, or if their number is not the sum of `sizes`.
    """
    count = len(samples)
    if count < 3 or count != sum(sizes):
        raise DataError(
            f"{count} samples of {sum(sizes)} cannot be measured",
            hint="give the whole order, of 3 samples or more",
        )
    shards = np.searchsorted(np.cumsum(sizes), samples, side="right")
    distance = np.abs(samples - np.arange(count)).mean() / ((count * count - 1) / (3 * count))
    correlation = np.corrcoef(samples[:-1], samples[1:])[0, 1]
    return Mixing(float(distance), float(correlation), float((shards[:-1] == shards[1:]).mean()))
