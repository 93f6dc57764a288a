"""Sample order of a run as a pure function of seed and position: full, by shards, or mixed.

The order by shards needs only a few shards at a time. It has two levels. The shards are permuted,
and each `window` consecutive shards form a block. Then the samples of each block are permuted. A
reader needs only the shards of one block, and can download those of the next block in the meantime.
The cost is weaker mixing, which `measure_mixing` measures: two adjacent samples are from the same
shard with a probability of about 1 / window, instead of 1 / number of shards.
"""

# S shards, N samples

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, final, get_args

import numpy as np

from surefoot.components.data.order import LARGEST, MAX_CYCLE, Permutation, derive, make_cycle
from surefoot.core.errors import DataError

Ends = Literal["repeat", "first", "once"]
MAX_KEPT = 64  # permutations of the sources of a mixture
SHUFFLED = 1000  # positions of a mixture that are shuffled together
OF_SOURCE, OF_CYCLE = 0x6D6978, 0x6379636C  # separate these draws from others of the seed
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


# ---- mixtures of sources


@dataclass(frozen=True)
class MixturePiece:
    """Positions of a mixture with the same shares, from `start` on.

    `read` are the samples of each source that the positions before it have read.
    """

    start: int
    shares: tuple[int, ...]
    read: tuple[int, ...]

    def count(self, end: int) -> tuple[int, ...]:
        """Return how many samples of each source the positions before `end` read."""
        cycle = make_cycle(self.shares)
        whole, rest = divmod(end - self.start, len(cycle.owners))
        inside = np.bincount(cycle.owners[:rest], minlength=len(self.shares)).tolist()
        return tuple(
            read + whole * share + part
            for read, share, part in zip(self.read, self.shares, inside, strict=True)
        )

    def find_end(self, sizes: Sequence[int]) -> int:
        """Return the first position that would read more than `sizes` samples of a source."""
        cycle, ends = make_cycle(self.shares), []
        for size, read, places in zip(sizes, self.read, cycle.places, strict=True):
            if len(places):
                whole, part = divmod(size - read, len(places))
                ends.append(self.start + whole * len(cycle.owners) + int(places[part]))
        return min(ends)


@dataclass(frozen=True)
class MixturePlan:
    """Settings that determine which samples the positions of a mixture read.

    Args:
        sizes: Samples of each source.
        shares: Whole numbers in the ratio of the sources.
        ends: What happens when a source ends: "repeat" reads it again, in another order; "first"
            ends the epoch before it; "once" goes on with the others.
        draws: Shuffle which source comes next, within 1,000 positions each.
        changes: Later shares, each with the position of the run from which on they hold.
    """

    sizes: tuple[int, ...]
    shares: tuple[int, ...]
    ends: Ends = "repeat"
    draws: bool = False
    changes: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def as_text(self) -> str:
        """Return the plan as text, for the header of a ledger.

        >>> MixturePlan((500, 20), (7, 3), changes=((100, (1, 1)),)).as_text()
        'repeat 500,20 7,3 100:1,1'
        """
        return " ".join(
            (
                f"{self.ends}{'+draws' * self.draws}",
                _join(self.sizes),
                _join(self.shares),
                *(f"{start}:{_join(shares)}" for start, shares in self.changes),
            )
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the plan that `as_text` describes. Raises DataError for any other text."""
        try:
            ends, sizes, shares, *changes = text.split(" ")
            kind: Any = ends.removesuffix("+draws")
            later = [each.partition(":") for each in changes]
            pieces = tuple((int(start), _split(of_piece)) for start, _, of_piece in later)
            found = cls(_split(sizes), _split(shares), kind, ends != kind, pieces)
        except ValueError:
            found = None
        if found is None or found.as_text() != text or not found.is_possible:
            raise DataError(f"{text!r:.80} is no mixture", hint="it was written by `as_text`")
        return found

    @property
    def is_possible(self) -> bool:
        """False for a plan that a damaged text describes."""
        every = [self.shares, *(shares for _, shares in self.changes)]
        starts = [0, *(start for start, _ in self.changes)]
        return (
            self.ends in get_args(Ends)
            and min(self.sizes) > 0
            and all(len(each) == len(self.sizes) for each in every)
            and all(min(each) >= 0 < sum(each) <= 2 * MAX_CYCLE for each in every)
            and starts == sorted(set(starts))
        )

    @functools.cached_property
    def pieces(self) -> tuple[MixturePiece, ...]:
        """Pieces of a run, or of each epoch if a source is not read again."""
        made = [MixturePiece(0, self.shares, (0,) * len(self.sizes))]
        for start, shares in self.changes:
            made.append(MixturePiece(start, shares, made[-1].count(start)))
        while self.ends == "once":
            last = made[-1]
            end = last.find_end(self.sizes)
            read = last.count(end)
            left = [
                share if done < size else 0
                for share, done, size in zip(last.shares, read, self.sizes, strict=True)
            ]
            if not any(left):
                break
            common = math.gcd(*left)
            made.append(MixturePiece(end, tuple(share // common for share in left), read))
        return tuple(made)

    @property
    def length(self) -> int:
        """Number of positions of an epoch."""
        return self.pieces[0].find_end(self.sizes) if self.ends == "first" else sum(self.sizes)

    def count(self, end: int) -> tuple[int, ...]:
        """Return how many samples of each source the positions before `end` read."""
        return next(each for each in reversed(self.pieces) if each.start <= end).count(end)


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _split(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


@final
@dataclass(frozen=True)
class MixtureOrder:
    """Sample order of a mixture; see `blocks.Order`, which it replaces.

    The number of a sample is its number among the samples of all sources. When a source is read
    again, their total number is added, so that what `augment` draws differs.

    Args:
        n: Number of positions of an epoch.
        seed: Seed of the permutations.
        plan: The mixture.
        shuffle: False to read each source in its order.
    """

    n: int
    seed: int
    plan: MixturePlan
    shuffle: bool = True
    chunk: int = 0
    window: int = 0
    _orders: dict[tuple[int, int], Permutation] = field(
        default_factory=dict, compare=False, repr=False
    )

    def permutation(self, epoch: int) -> Any:
        """Return a function from positions in `epoch` to sample numbers."""
        return functools.partial(self._read, epoch)

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the samples at positions start..stop-1 of `epoch`, int64."""
        return self._read(epoch, np.arange(start, stop, dtype=np.int64))

    def count(self, epoch: int, position: int, end: int) -> tuple[int, ...]:
        """Return how many samples of each source the run reads before a position of an epoch.

        An epoch reads the positions before `end`.
        """
        if self.plan.ends == "repeat":
            return self._count(0, epoch * self.n + position)
        part = self._count(epoch, position)
        if not self.plan.draws:  # else the samples that an epoch drops differ
            return tuple(
                epoch * each + rest for each, rest in zip(self._count(0, end), part, strict=True)
            )
        totals = self._totals
        while len(totals) <= epoch:
            totals.append(tuple(map(operator.add, totals[-1], self._count(len(totals) - 1, end))))
        return tuple(map(operator.add, totals[epoch], part))

    @functools.cached_property
    def _totals(self) -> list[tuple[int, ...]]:
        """Samples of each source before each epoch, as far as they were counted."""
        return [(0,) * len(self.plan.sizes)]

    def _count(self, epoch: int, place: int) -> tuple[int, ...]:
        piece, end = self._find_piece(place)
        start = place - (place - piece.start) % SHUFFLED
        if not self.plan.draws or start == place:
            return piece.count(place)
        owners, _ = self._draw(piece, end, epoch, start)
        inside = np.bincount(owners[: place - start], minlength=len(piece.shares)).tolist()
        return tuple(map(operator.add, piece.count(start), inside))

    def _find_piece(self, place: int) -> tuple[MixturePiece, int]:
        """Return the piece that a place is in, and the end of the piece."""
        pieces = self.plan.pieces
        number = max(k for k, each in enumerate(pieces) if each.start <= place)
        return pieces[number], self._ends[number]

    @functools.cached_property
    def _ends(self) -> list[int]:
        last = LARGEST**2 if self.plan.ends == "repeat" else self.n
        return [*(each.start for each in self.plan.pieces[1:]), last]

    def _read(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        plan, repeats = self.plan, self.plan.ends == "repeat"
        places = positions + epoch * self.n if repeats else positions
        starts = [each.start for each in plan.pieces]
        numbers = np.searchsorted(starts, places, side="right") - 1
        found = np.empty_like(places)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            found[mine] = self._read_piece(
                plan.pieces[number], self._ends[number], epoch, places[mine]
            )
        return found

    def _read_piece(
        self, piece: MixturePiece, end: int, epoch: int, places: np.ndarray
    ) -> np.ndarray:
        plan = self.plan
        if plan.draws:
            of_epoch = 0 if plan.ends == "repeat" else epoch
            owners, nth = np.empty_like(places), np.empty_like(places)
            starts = places - (places - piece.start) % SHUFFLED
            for start in np.unique(starts).tolist():
                mine = starts == start
                drawn, reads = self._draw(piece, end, of_epoch, start)
                owners[mine], nth[mine] = drawn[places[mine] - start], reads[places[mine] - start]
        else:
            cycle = make_cycle(piece.shares)
            number_of_cycle, inside = np.divmod(places - piece.start, len(cycle.owners))
            owners = cycle.owners[inside]
            shares, read = np.array(piece.shares), np.array(piece.read)
            nth = read[owners] + number_of_cycle * shares[owners] + cycle.ranks[inside]
        sizes = np.array(plan.sizes)
        passes, within = np.divmod(nth, sizes[owners])
        found = np.empty_like(places)
        repeats = plan.ends == "repeat"
        for source, of_pass in np.unique(np.stack([owners, passes]), axis=1).T.tolist():
            mine = (owners == source) & (passes == of_pass)
            found[mine] = self._of_source(source, of_pass if repeats else epoch, within[mine])
        begins = np.cumsum(sizes) - sizes
        found += begins[owners] + passes * int(sizes.sum())
        return found

    def _of_source(self, source: int, number_of_pass: int, within: np.ndarray) -> np.ndarray:
        if not self.shuffle:
            return within
        key = (source, number_of_pass)
        order = self._orders.get(key)
        if order is None:
            seed = derive(self.seed, OF_SOURCE, source, number_of_pass)
            if len(self._orders) >= max(MAX_KEPT, 2 * len(self.plan.sizes)):
                self._orders.clear()
            order = self._orders[key] = Permutation(self.plan.sizes[source], seed)
        found: np.ndarray = order(within)
        return found

    def _draw(
        self, piece: MixturePiece, end: int, epoch: int, start: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources of up to 1,000 positions in a random order, and the number of each.

        A number counts the samples of the source that were read before. The positions begin at
        `start`, and a block ends at the end of the piece.
        """
        cycle = make_cycle(piece.shares)
        places = np.arange(start, min(start + SHUFFLED, end), dtype=np.int64)
        order = Permutation(len(places), derive(self.seed, OF_CYCLE, epoch, start))
        owners = cycle.owners[(places - piece.start) % len(cycle.owners)][order(places - start)]
        nth = np.empty_like(places)
        for source, before in enumerate(piece.count(start)):
            mine = owners == source
            nth[mine] = before + np.arange(int(mine.sum()))
        return owners, nth
