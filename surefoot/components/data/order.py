"""Sample order and augmentation draws as pure functions, without a state to save.

The sample order depends only on (seed, epoch, position). Above 8,192 samples, it is a six-round
Feistel network over the next power of four above n with cycle walking (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002); the round function is splitmix64's finalizer. For fewer
samples, the halves of the network are too small to mix well: pairs fail a chi-square test. These
samples are sorted by their hashes instead, in a table of at most 64 KiB. Augmentation draws are a
hash of (seed, epoch, sample, draw), so that they do not depend on the worker.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch

from surefoot.core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

LARGEST = 2**40
CPU = torch.device("cpu")
ROUNDS = 6
MAX_TABLE = 8192
MAX_CYCLE = 100_000  # longest cycle; shares are rounded to it
FEW = 6  # up to this many are walked one by one: numpy calls on an array would take longer
_MASK64 = (1 << 64) - 1
_INCREMENT, _LAST_SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(31)
_STAGES = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def mix(value: int) -> int:
    """Hash a Python integer to 64 bits by splitmix64's finalizer (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def derive(*parts: int) -> int:
    """Return a 64-bit key derived from several integers; the order of the parts matters."""
    key = 0
    for part in parts:
        key = mix(key ^ (part & _MASK64))
    return key


def _mix_array(values: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = values + _INCREMENT
    for shift, factor in _STAGES:
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> _LAST_SHIFT
    return mixed


class Permutation:
    """Pseudorandom permutation of 0..n-1 that computes the entry at any position in O(1).

    `key` is the seed. Call the object with an array of positions.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= LARGEST:
            raise DataError(
                f"a source of {n} samples cannot be shuffled", hint=f"use 1 to {LARGEST} samples"
            )
        self.n = n
        half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        self._shift = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        self._table = None
        if n <= MAX_TABLE:
            hashes = _mix_array(np.arange(n, dtype=np.uint64) ^ np.uint64(derive(key, ROUNDS)))
            self._table = np.argsort(hashes, kind="stable")
        self._round_keys = [np.uint64(derive(key, round_number)) for round_number in range(ROUNDS)]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples (int64) at `positions` (int64 in [0, n)), in the same shape."""
        if self._table is not None:
            chosen: np.ndarray = self._table[positions]
            return chosen
        values = self._encrypt(positions.astype(np.uint64).ravel())
        outside = np.flatnonzero(values >= self.n)
        # cycle walking: the domain is under four times n, so few rounds are expected
        while len(outside) > FEW:
            walked = self._encrypt(values[outside])
            values[outside] = walked
            outside = outside[walked >= self.n]
        for place in outside.tolist():
            values[place] = self._walk(int(values[place]))
        return values.astype(np.int64).reshape(positions.shape)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._shift, values & self._mask
        for key in self._round_keys:
            mixed = _mix_array(right ^ key)
            mixed &= self._mask
            mixed ^= left
            left, right = right, mixed
        return (left << self._shift) | right

    def _walk(self, value: int) -> int:
        """Apply the network of `_encrypt` until the result is below n, and return the result.

        This function is for a single Python integer, which is n or more.
        """
        shift, mask = int(self._shift), int(self._mask)
        while value >= self.n:
            left, right = value >> shift, value & mask
            for key in self._round_keys:
                left, right = right, left ^ (mix(right ^ int(key)) & mask)
            value = left << shift | right
        return value


@dataclass(frozen=True)
class Keys:
    """Random draws for a batch, which depend only on (seed, epoch, sample).

    Augmentation is therefore the same in any worker, on any rank and after a restart.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        ids: Numbers of the samples in the batch, (B,) int64.
        device: Device of the returned tensors, usually that of the batch. The values are the same
            on each device.
    """

    seed: int
    epoch: int
    ids: np.ndarray
    device: torch.device = CPU

    def _bits(self, draws: int, stream: int) -> np.ndarray:
        base = _mix_array(
            self.ids.astype(np.uint64) ^ np.uint64(derive(self.seed, 2, self.epoch, stream))
        )
        return _mix_array(
            base[:, None] + np.arange(1, draws + 1, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
        )

    def uniform(self, draws: int = 1, *, stream: int = 0) -> torch.Tensor:
        """Return uniform random numbers in [0, 1), float32, of shape (batch, draws).

        Calls with different values of `stream` return independent numbers.
        """
        drawn = (self._bits(draws, stream) >> np.uint64(40)).astype(np.float32)
        return self._there(torch.from_numpy(drawn * np.float32(2.0**-24)))

    def integers(self, low: int, high: int, draws: int = 1, *, stream: int = 0) -> torch.Tensor:
        """Return random integers in [low, high), int64, of shape (batch, draws).

        Their bias is under (high - low) / 2**32.
        """
        wide = (self._bits(draws, stream) >> np.uint64(32)) * np.uint64(high - low)
        return self._there(torch.from_numpy((wide >> np.uint64(32)).astype(np.int64) + low))

    def normal(self, draws: int = 1, *, stream: int = 0) -> torch.Tensor:
        """Return standard normal random numbers, float32, of shape (batch, draws).

        They can serve as the noise of a diffusion model or of a generator.
        """
        uniform = ((self._bits(draws, stream) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return self._there(torch.special.ndtri(torch.from_numpy(uniform)).float())

    def _there(self, drawn: torch.Tensor) -> torch.Tensor:
        # no wait: CUDA copies pageable memory into a staging buffer before the call returns
        return drawn.to(self.device, non_blocking=True)


def check_ids(ids: ArrayLike, length: int) -> np.ndarray:
    """Return the requested sample numbers as an int64 array.

    Raises DataError for a number outside 0..length-1. Without this check, numpy would count
    negative numbers from the end.
    """
    ids = np.asarray(ids)
    # read as uint64, a negative number exceeds any length
    if ids.ndim == 1 and ids.dtype == np.int64 and len(ids):  # called at every step
        if int(np.maximum.reduce(ids.view(np.uint64))) < length:
            return ids
    elif ids.ndim == 1 and not len(ids):
        return ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(
            f"samples were requested by an array of dtype {ids.dtype} and shape {ids.shape}",
            hint=f"give a list of integers from 0 to {length - 1:,}",
        )
    if ids.astype(np.uint64).max() >= length:
        wrong = int(ids[(ids < 0) | (ids >= length)][0])
        raise DataError(
            f"sample {wrong:,} was requested",
            hint=f"the source has the samples 0 to {length - 1:,}",
        )
    return ids.astype(np.int64, copy=False)


# ---- shares of a mixture: K sources, D positions of a cycle


def find_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers in the ratio of `weights`, with a sum of at most `MAX_CYCLE`.

    >>> find_shares([0.7, 0.3]), find_shares([1, 1, 1]), find_shares([2.5, 0.5])
    ((7, 3), (1, 1, 1), (5, 1))
    """
    exact = [Fraction(str(float(weight))) for weight in weights]
    known = [(each / max(exact)).limit_denominator(MAX_CYCLE) for each in exact]
    if any(part and not rounded for part, rounded in zip(exact, known, strict=True)):
        known = exact
    total = sum(known)
    parts = [each / total for each in known]
    cycle = math.lcm(*(each.denominator for each in parts))
    if cycle <= MAX_CYCLE:
        return tuple(int(each * cycle) for each in parts)
    # rounded by the largest remainders, each source with a weight has one position at least
    wanted = [each * MAX_CYCLE for each in parts]
    shares = [max(bool(each), math.floor(each)) for each in wanted]
    for number in sorted(range(len(parts)), key=lambda k: shares[k] - wanted[k]):
        if sum(shares) < MAX_CYCLE and parts[number]:
            shares[number] += 1
    common = math.gcd(*shares)
    return tuple(each // common for each in shares)


@dataclass(frozen=True)
class Cycle:
    """Sources of the positions of a cycle.

    `owners` (D,) is the source of each position, `ranks` (D,) the number of earlier positions of
    the same source, and `places` has the positions of each source.
    """

    owners: np.ndarray
    ranks: np.ndarray
    places: tuple[np.ndarray, ...]


@functools.lru_cache(maxsize=128)
def make_cycle(shares: tuple[int, ...]) -> Cycle:
    """Deal the positions of a cycle to sources, of which each gets its number in `shares`.

    After any number of positions, each source has within one of its exact share (R. Tijdeman, "The
    chairman assignment problem", 1980). All counts are exact after a cycle.
    """
    length, count = sum(shares), len(shares)
    slack = max(1, 2 * sum(map(bool, shares)) - 2)
    owners = np.empty(length, dtype=np.int64)
    given = [0] * count
    ready: list[tuple[float, int]] = []  # by the end of the time in which the next one is due
    # a source may get its next position from the time on at which it is 1 / slack behind
    waiting = [(-(-length // (slack * share)), k) for k, share in enumerate(shares) if share]
    heapq.heapify(waiting)
    for position in range(1, length + 1):
        while waiting and waiting[0][0] <= position:
            _, k = heapq.heappop(waiting)
            heapq.heappush(ready, (length * (given[k] + 1) / shares[k], k))
        _, k = heapq.heappop(ready)
        owners[position - 1] = k
        given[k] += 1
        behind = length * (slack * given[k] + 1)
        heapq.heappush(waiting, (-(-behind // (slack * shares[k])), k))
    places = tuple(np.flatnonzero(owners == number) for number in range(count))
    ranks = np.empty(length, dtype=np.int64)
    for of_source in places:
        ranks[of_source] = np.arange(len(of_source))
    return Cycle(owners, ranks, places)
