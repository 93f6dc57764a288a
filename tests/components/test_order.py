"""The order of samples and the keys of augmentation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed
from surefoot.components.data.order import Keys, Permutation
from surefoot.components.data.sources.arrays import Arrays
from surefoot.core.errors import DataError

LARGE = 2**40


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 1000, 1797, 8192, 8193, 50_000])
def test_every_sample_stands_at_exactly_one_position(n: int) -> None:
    ids = Permutation(n, key=7)(np.arange(n))
    assert np.array_equal(np.sort(ids), np.arange(n))


def test_positions_of_the_largest_set_are_looked_up_without_any_table() -> None:
    permutation = Permutation(LARGE, key=3)
    positions = np.array([0, 1, LARGE // 2, LARGE - 1])
    ids = permutation(positions)
    assert len(set(ids.tolist())) == 4
    assert ((ids >= 0) & (ids < LARGE)).all()
    assert np.array_equal(permutation(positions[2:]), ids[2:])


@pytest.mark.parametrize("n", [0, -1, LARGE + 1])
def test_a_set_that_cannot_be_ordered_is_refused(n: int) -> None:
    with pytest.raises(DataError, match="cannot be shuffled"):
        Permutation(n, key=1)


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("n", [20, 60])
def test_where_a_sample_stands_is_uniform_over_keys(n: int) -> None:
    keys = 2000
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), Permutation(n, key)(np.arange(n))] += 1
    statistic, freedom = chi_square(counts), (n - 1) ** 2
    # six deviations of a chi-square of that many degrees
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom)


def test_neighbouring_positions_of_a_small_set_hold_independent_pairs() -> None:
    n, keys = 12, 20_000
    counts = np.zeros((n, n))
    for key in range(keys):
        ids = Permutation(n, key)(np.arange(2))
        counts[ids[0], ids[1]] += 1
    pairs = counts[~np.eye(n, dtype=bool)]
    assert abs(chi_square(pairs) - (pairs.size - 1)) < 6 * np.sqrt(2 * pairs.size)


@pytest.mark.parametrize("coarse", ["high", "low"])
@pytest.mark.parametrize("distance", [1, 128])
def test_positions_of_a_large_set_hold_independent_pairs_in_their_high_and_low_bits(
    coarse: str, distance: int
) -> None:
    n, bins = 9_000, 12
    counts = np.zeros((bins, bins))
    for key in range(40):
        ids = Permutation(n, key)(np.arange(n))
        part = ids * bins // n if coarse == "high" else ids % bins
        np.add.at(counts, (part[:-distance], part[distance:]), 1)
    assert abs(chi_square(counts) - (bins * bins - 1)) < 6 * np.sqrt(2 * bins * bins)


@pytest.mark.parametrize("n", [8_193, 50_000, 10_000_000])
def test_a_position_holds_the_same_sample_alone_and_among_many(n: int) -> None:
    permutation = Permutation(n, 7)
    positions = np.random.default_rng(0).integers(0, n, 300)
    assert [int(permutation(positions[at : at + 1])[0]) for at in range(300)] == permutation(
        positions
    ).tolist()


def test_each_epoch_has_its_own_order_and_the_same_one_again() -> None:
    order = Order(1000, seed=5)
    first, second = order.ids(0, 0, 1000), order.ids(1, 0, 1000)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, Order(1000, seed=5).ids(0, 0, 1000))
    assert not np.array_equal(first, Order(1000, seed=6).ids(0, 0, 1000))


def feed(n: int, batch: int, **how: bool | int) -> Feed:
    return Feed(Arrays(torch.arange(n)), Order(n, seed=1), batch=batch, **how)  # type: ignore[arg-type]


def test_a_feed_seeks_to_any_step_and_gives_what_it_would_have_given_in_turn() -> None:
    in_turn = feed(10_007, 64)
    windows = [in_turn.window(step).ids.copy() for step in range(400)]
    for step in (399, 0, 157, 156, 158, 314):
        assert np.array_equal(feed(10_007, 64).window(step).ids, windows[step])


def test_an_epoch_holds_every_sample_once_when_the_last_batch_is_kept() -> None:
    one = feed(103, 10)
    ids = np.concatenate([one.window(step).ids for step in range(one.steps_per_epoch)])
    assert one.steps_per_epoch == 11
    assert np.array_equal(np.sort(ids), np.arange(103))


def test_a_dropped_last_batch_says_how_many_samples_it_had() -> None:
    one = feed(103, 10, drop_last=True)
    assert (one.steps_per_epoch, one.dropped) == (10, 3)
    assert all(len(one.window(step).ids) == 10 for step in range(20))


@pytest.mark.parametrize(
    ("samples", "steps"), [(0, 0), (1, 1), (100, 10), (103, 11), (104, 12), (206, 22), (0.5, 1)]
)
def test_samples_become_steps_with_the_short_last_batch_counted_as_what_it_is(
    samples: float, steps: int
) -> None:
    assert feed(103, 10).steps_for(samples) == steps


def test_ten_microbatches_in_windows_of_four_are_three_updates_and_none_crosses_the_epoch() -> None:
    one = feed(40, 16, microbatch=4)
    assert [len(one.microbatches(one.window(step))) for step in range(4)] == [4, 4, 2, 4]
    assert one.window(3).epoch == 1


def test_augmentation_draws_depend_on_the_sample_and_not_on_its_neighbours() -> None:
    ids = np.array([3, 9, 4])
    whole = Keys(1, 2, ids).uniform(5)
    alone = Keys(1, 2, ids[1:2]).uniform(5)
    assert torch.equal(whole[1:2], alone)
    assert not torch.equal(whole, Keys(1, 3, ids).uniform(5))
    assert not torch.equal(whole, Keys(1, 2, ids).uniform(5, stream=1))


def test_draws_are_on_the_device_of_the_batch() -> None:
    keys = Keys(1, 2, np.array([3, 9]), torch.device("meta"))
    drawn = (keys.uniform(2), keys.integers(0, 3), keys.normal())
    assert [each.device.type for each in drawn] == ["meta"] * 3


def test_normal_draws_of_a_sample_are_its_own_and_follow_the_standard_normal_distribution() -> None:
    ids = np.arange(20_000)
    draws = Keys(1, 0, ids).normal(2)
    assert torch.equal(draws[7:9], Keys(1, 0, ids[7:9]).normal(2))
    assert draws.isfinite().all()
    shares = torch.special.ndtr(draws.double())  # uniform, if the distribution is right
    assert abs(chi_square(torch.histc(shares, bins=50, min=0, max=1).numpy()) - 49) < 6 * np.sqrt(
        98
    )
    assert abs(np.corrcoef(draws.T.numpy())[0, 1]) < 5 / np.sqrt(20_000)


def test_augmentation_draws_are_uniform_and_uncorrelated() -> None:
    draws = Keys(1, 0, np.arange(20_000)).uniform(2).double()
    counts = torch.histc(draws[:, 0], bins=50, min=0, max=1).numpy()
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(chi_square(counts) - 49) < 6 * np.sqrt(98)
    assert abs(np.corrcoef(draws.T.numpy())[0, 1]) < 5 / np.sqrt(20_000)
    whole = Keys(1, 0, np.arange(20_000)).integers(-2, 3)
    assert sorted(set(whole.flatten().tolist())) == [-2, -1, 0, 1, 2]
