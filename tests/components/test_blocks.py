"""Tests of an order by blocks of shards.

Each sample once, found at any position, within few shards at a time, and how well that mixes.
"""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.components.data.blocks import BlockShuffle, Mixing, measure_mixing
from surefoot.components.data.order import Permutation
from surefoot.core.errors import DataError

SIZES = [5, 1, 9, 300, 2, 7, 7, 40, 3, 11]


def shards_of(samples: np.ndarray, sizes: list[int]) -> np.ndarray:
    return np.searchsorted(np.cumsum(sizes), samples, side="right")


@pytest.mark.parametrize("window", [1, 2, 3, 9, 10, 99])
def test_each_sample_comes_once_whatever_the_sizes_of_shards(window: int) -> None:
    order = BlockShuffle(SIZES, key=7, window=window)
    assert order.n == sum(SIZES)
    assert sorted(order(np.arange(order.n)).tolist()) == list(range(order.n))


def test_any_position_is_found_by_itself_and_by_another_object() -> None:
    whole = BlockShuffle(SIZES, key=7, window=3)(np.arange(sum(SIZES)))
    for position in np.random.default_rng(0).permutation(sum(SIZES))[:100]:
        assert BlockShuffle(SIZES, key=7, window=3)(np.array([position]))[0] == whole[position]
    order = BlockShuffle(SIZES, key=7, window=3)
    square = np.random.default_rng(1).integers(0, sum(SIZES), (6, 8))
    assert np.array_equal(order(square), whole[square])


@pytest.mark.parametrize("window", [1, 3, 4])
def test_no_more_shards_than_the_window_are_needed_at_a_time(window: int) -> None:
    order = BlockShuffle(SIZES, key=3, window=window)
    seen = shards_of(order(np.arange(order.n)), SIZES).tolist()
    first = {shard: seen.index(shard) for shard in seen}
    last = {shard: order.n - 1 - seen[::-1].index(shard) for shard in seen}
    for position in range(order.n):
        assert sum(first[shard] <= position <= last[shard] for shard in first) <= window
    assert [
        shard for block in order.blocks() for shard in sorted(block, key=first.__getitem__)
    ] == sorted(first, key=first.__getitem__)


def test_another_key_is_another_order_of_shards_and_of_samples() -> None:
    sizes = [50] * 20
    one, other = (BlockShuffle(sizes, key, window=4) for key in (1, 2))
    assert one.blocks() != other.blocks()
    same = (one(np.arange(1000)) == other(np.arange(1000))).mean()
    assert same < 0.02


def test_the_room_that_an_order_needs_is_told_in_bytes() -> None:
    order = BlockShuffle([1] * 5, key=0, window=2)
    sizes = [10, 20, 30, 40, 50]
    held = [sum(sizes[shard] for shard in block) for block in order.blocks()]
    assert sum(held) == 150
    assert order.look_ahead_bytes(sizes) == (max(held), max(held[0] + held[1], held[1] + held[2]))


def test_how_well_blocks_mix_is_measured_against_the_full_permutation() -> None:
    sizes = [100] * 100
    full = measure_mixing(Permutation(10_000, 5)(np.arange(10_000)), sizes)
    assert full.displacement == pytest.approx(1.0, abs=0.02)
    assert full.correlation == pytest.approx(0.0, abs=0.03)
    assert full.same_shard == pytest.approx(1 / 100, abs=0.004)
    for window in (1, 4, 16):
        blocks = measure_mixing(BlockShuffle(sizes, 5, window)(np.arange(10_000)), sizes)
        assert blocks.same_shard == pytest.approx(1 / window, rel=0.1)
        assert blocks.correlation == pytest.approx((100 - window) / (window * 99), abs=0.1)
    whole = measure_mixing(BlockShuffle(sizes, 5, 100)(np.arange(10_000)), sizes)
    assert whole.correlation == pytest.approx(0.0, abs=0.03)
    assert measure_mixing(np.arange(10_000), sizes) == Mixing(
        0.0, pytest.approx(1.0), pytest.approx(0.99, abs=0.001)
    )


def test_inside_a_block_every_order_is_as_likely() -> None:
    counts = np.zeros((6, 6))
    for key in range(3000):
        counts[np.arange(6), BlockShuffle([2, 2, 2], key, window=3)(np.arange(6))] += 1
    # rows and columns are full: 25 degrees of freedom
    chi_square = float(((counts - 500) ** 2 / 500).sum()) * 5 / 6
    assert chi_square < 52.6  # one case of a thousand


@pytest.mark.parametrize(
    ("sizes", "window", "says"),
    [([], 1, "cannot be shuffled"), ([3, 0], 1, "cannot be shuffled"), ([3], 0, "window of 0")],
)
def test_what_cannot_be_is_told(sizes: list[int], window: int, says: str) -> None:
    with pytest.raises(DataError, match=says):
        BlockShuffle(sizes, 0, window)
    with pytest.raises(DataError, match="cannot be measured"):
        measure_mixing(np.arange(5), [9])
