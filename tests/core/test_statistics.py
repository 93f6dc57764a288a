"""Statistics that keep their word.

Known values, and verdicts that are right as often as they say.
"""

from __future__ import annotations

import math
import statistics as of_python
from itertools import accumulate

import numpy as np
import pytest

from surefoot.core.errors import InputError
from surefoot.core.statistics import (
    FALSE_CALL,
    RESAMPLES,
    Interval,
    bootstrap_median,
    looks,
    mean,
    mean_difference,
    median,
    median_interval,
    paired_difference,
    paired_ratio,
    quantiles,
    sequential_ratio,
    sign_test_rank,
    standard_deviation,
    student_quantile,
)

# 1879, run 1
MICHELSON = [850.0, 740, 900, 1070, 930, 850, 950, 980, 980, 880]
MICHELSON += [1000, 980, 930, 650, 760, 810, 1000, 1000, 960, 960]


def test_known_values() -> None:
    assert mean(MICHELSON) == pytest.approx(909.0)
    assert standard_deviation(MICHELSON) == pytest.approx(104.9260391)
    assert median(MICHELSON) == 940.0
    assert quantiles(MICHELSON, [0.25, 0.5, 0.75]) == pytest.approx(
        of_python.quantiles(MICHELSON, n=4, method="inclusive")
    )
    assert standard_deviation([3.0]) is None


@pytest.mark.parametrize(
    ("count", "least"), [(6, 1), (8, 1), (9, 2), (10, 2), (15, 4), (20, 6), (30, 10), (100, 40)]
)
def test_an_interval_is_never_narrower_than_the_exact_one_of_the_sign_test(
    count: int, least: int
) -> None:
    """The ranks are those of Conover, Practical Nonparametric Statistics, for p = 0.5 at 95 %."""
    interval = median_interval([float(value) for value in range(1, count + 1)])
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low <= least
    assert interval.high >= count + 1 - least


def test_an_interval_of_very_many_values_is_the_one_of_the_binomial_distribution() -> None:
    count = 2000
    interval = median_interval(list(np.random.default_rng(0).permutation(count).astype(float)))
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low == pytest.approx(count / 2 - 0.98 * math.sqrt(count), abs=8)
    assert interval.high == pytest.approx(count / 2 + 0.98 * math.sqrt(count), abs=8)


def test_the_same_seed_gives_the_same_interval_and_the_order_does_not_matter() -> None:
    values = [0.9, 1.1, 1.0, 0.97, 1.2, 0.8, 1.05]
    assert median_interval(values, seed=3) == median_interval(values[::-1], seed=3)


@pytest.mark.parametrize("count", [*range(1, 40), 200, 999, 1000, 3001])
def test_the_sign_test_s_rank_is_that_of_the_exact_binomial_tail(count: int) -> None:
    # of 2^n throws
    tails = list(accumulate(math.comb(count, heads) for heads in range(count // 2)))
    exact = max((k for k, tail in enumerate(tails) if 40 * tail <= 2**count), default=None)
    rank = sign_test_rank(count)
    if count < 1000 or rank is None or exact is None:
        assert rank == exact
    else:
        assert exact - 2 <= rank <= exact  # an approximation from here on: never narrower


@pytest.mark.parametrize("count", [7, 15, 31])
def test_the_bootstrap_s_bounds_are_those_of_its_exact_distribution(count: int) -> None:
    """For odd n a resample's median is at most the k-th value
    when more than half of n draws fall on the first k."""

    def at_most(k: int) -> float:
        share = k / count
        return sum(
            math.comb(count, j) * share**j * (1 - share) ** (count - j)
            for j in range(count // 2 + 1, count + 1)
        )

    low, high = bootstrap_median([float(value) for value in range(1, count + 1)], seed=1)
    slack = 3 * math.sqrt(0.025 * 0.975 / RESAMPLES)
    assert at_most(int(low) - 1) < 0.025 + slack
    assert at_most(int(low)) > 0.025 - slack
    assert at_most(int(high) - 1) < 0.975 + slack
    assert at_most(int(high)) > 0.975 - slack


def test_a_bootstrap_draws_from_its_seed_alone() -> None:
    values = list(np.random.default_rng(0).normal(size=50))
    assert bootstrap_median(values, seed=3) == bootstrap_median(values[::-1], seed=3)
    assert len({bootstrap_median(values, seed=seed) for seed in range(20)}) > 1


@pytest.mark.quick("6", "15")
@pytest.mark.parametrize("count", [6, 7, 15])
def test_identical_arms_show_no_effect_in_at_least_nine_of_ten_trials(count: int) -> None:
    """Both arms draw from one distribution of times.

    It has a floor, a long tail, and a machine whose speed drifts.
    """
    generator, trials = np.random.default_rng(count), 400
    verdicts = []
    for trial in range(trials):
        drift = np.exp(np.cumsum(generator.normal(0, 0.03, count)))
        arms = [drift * (1 + generator.exponential(0.05, count)) for _ in range(2)]
        verdicts.append(paired_ratio(list(arms[0]), list(arms[1]), seed=trial).verdict)
    assert verdicts.count("no effect") >= 0.9 * trials
    # what the interval itself claims
    assert verdicts.count("no effect") >= 0.95 * trials - 2 * math.sqrt(trials * 0.95 * 0.05)


def test_an_effect_of_five_per_cent_is_found_under_drift_that_is_larger() -> None:
    generator = np.random.default_rng(1)
    found = []
    for trial in range(100):
        drift = np.exp(np.cumsum(generator.normal(0, 0.2, 15)))
        baseline = drift * np.exp(generator.normal(0, 0.02, 15))
        candidate = 0.95 * drift * np.exp(generator.normal(0, 0.02, 15))
        interval = paired_ratio(list(candidate), list(baseline), seed=trial)
        found.append(interval.verdict)
        assert interval.estimate == pytest.approx(0.95, abs=0.05)
    assert found.count("lower") >= 95


def test_fewer_than_six_values_have_a_median_and_no_interval() -> None:
    interval = paired_ratio([1.0] * 5, [2.0] * 5)
    assert (interval.estimate, interval.low, interval.high, interval.verdict) == (
        0.5,
        None,
        None,
        "too few",
    )
    assert str(interval) == "0.5 (n/a, n = 5)"
    assert median_interval([1.0] * 6).low == 1.0


def test_a_verdict_is_about_the_interval_and_not_the_estimate() -> None:
    def verdict(low: float, high: float) -> str:
        return Interval(estimate=0.9, low=low, high=high, count=15, neutral=1.0).verdict

    assert [verdict(0.8, 1.0), verdict(0.8, 1.1), verdict(0.8, 0.99), verdict(1.01, 1.2)] == [
        "no effect",
        "no effect",
        "lower",
        "higher",
    ]


def test_differences_are_paired_by_their_place() -> None:
    scores = [0.991, 0.985, 0.997, 0.979, 0.994, 0.988]
    better = [score + 0.002 for score in scores]
    interval = paired_difference(better, scores)
    assert interval.estimate == pytest.approx(0.002)
    assert interval.verdict == "higher"
    assert paired_difference(scores, scores).verdict == "no effect"


def test_what_cannot_be_compared_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="paired samples need the same count: got 3 and 2 values"):
        paired_ratio([1, 2, 3], [1, 2])
    with pytest.raises(InputError, match="above 0"):
        paired_ratio([1.0], [0.0])
    with pytest.raises(InputError, match="1 of 2 values are not finite"):
        mean([1.0, math.nan])
    with pytest.raises(InputError, match="at least one number"):
        median([])
    with pytest.raises(InputError, match="from 0 to 1"):
        quantiles([1.0], [50])


@pytest.mark.parametrize("most", [7, 15, 31])
def test_a_trial_that_stops_at_any_look_calls_an_effect_that_is_none_as_seldom_as_it_says(
    most: int,
) -> None:
    """Every sequence of coins up to 15, and drawn ones beyond.

    Stopped at the first look that shows a gain.
    """
    ranks = looks(most)
    assert ranks
    generator = np.random.default_rng(most)
    if most <= 15:
        coins = (np.arange(1 << most)[:, None] >> np.arange(most)) & 1
    else:
        coins = generator.integers(0, 2, (1 << 17, most))
    called = np.zeros(len(coins), dtype=bool)
    for count, rank in ranks.items():
        called |= coins[:, :count].sum(axis=1) <= rank
    slack = 0.0 if most <= 15 else 3 * math.sqrt(FALSE_CALL / len(coins))
    assert 0.005 < called.mean() <= FALSE_CALL + slack


def test_an_interval_that_is_read_until_it_shows_something_is_wrong_far_more_often() -> None:
    """The interval of a fixed n, read after 7, 8, 9 ... 31 pairs, is what `looks` is for.

    It finds an effect in equal arms too often.
    """
    coins = np.random.default_rng(0).integers(0, 2, (20_000, 31))
    called = np.zeros(len(coins), dtype=bool)
    for count in range(7, 32):
        called |= coins[:, :count].sum(axis=1) <= (sign_test_rank(count) or 0)
    assert called.mean() > 2 * 0.025


def test_equal_arms_stop_with_no_effect_and_a_gain_of_five_per_cent_is_found_early() -> None:
    generator = np.random.default_rng(5)
    found: list[int] = []
    for _ in range(200):
        drift = np.exp(np.cumsum(generator.normal(0, 0.2, 15)))
        baseline = drift * np.exp(generator.normal(0, 0.015, 15))
        candidate = 0.95 * drift * np.exp(generator.normal(0, 0.015, 15))
        verdicts = {
            n: sequential_ratio(candidate[:n].tolist(), baseline[:n].tolist(), most=15).verdict
            for n in range(1, 16)
        }
        assert all(verdicts[n] == "too few" for n in range(1, 16) if n not in looks(15))
        found.append(next((n for n in looks(15) if verdicts[n] == "lower"), 99))
    assert found.count(7) >= 160
    assert found.count(99) <= 4


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30])
def test_student_s_quantile_holds_the_share_of_drawn_values_that_it_says(freedom: int) -> None:
    if freedom in (1, 2):  # known in closed form
        expected = (
            math.tan(math.pi * 0.475) if freedom == 1 else 0.95 * math.sqrt(2 / (1 - 0.95**2))
        )
        assert student_quantile(freedom) == pytest.approx(expected, rel=1e-9)
    drawn = np.random.default_rng(freedom).standard_t(freedom, 200_000)
    assert (np.abs(drawn) <= student_quantile(freedom)).mean() == pytest.approx(0.95, abs=0.003)


@pytest.mark.quick("3-3-True", "2-6-False")
@pytest.mark.parametrize(
    ("ours", "theirs", "paired"), [(3, 3, False), (3, 3, True), (2, 6, False), (5, 5, False)]
)
def test_equal_code_shows_no_difference_of_means_in_nine_of_ten_comparisons(
    ours: int, theirs: int, paired: bool
) -> None:
    """Scores scatter evenly: what n runs of the same code give."""
    generator = np.random.default_rng(ours + theirs)
    verdicts = [
        mean_difference(
            generator.normal(0.9, 0.004, ours).tolist(),
            generator.normal(0.9, 0.004, theirs).tolist(),
            paired=paired,
        ).verdict
        for _ in range(2000)
    ]
    assert verdicts.count("no effect") >= 0.9 * len(verdicts)
    far = [
        mean_difference(
            generator.normal(0.8, 0.004, 5).tolist(), generator.normal(0.9, 0.004, 5).tolist()
        ).verdict
        for _ in range(50)
    ]
    assert far.count("lower") == 50


def test_one_run_on_a_side_has_a_difference_and_no_interval() -> None:
    assert mean_difference([0.9], [0.8, 0.7]).verdict == "too few"
    assert mean_difference([0.9], [0.8], paired=True).verdict == "too few"
    assert mean_difference([0.9, 0.9], [0.8, 0.8]).verdict == "higher"
    assert mean_difference([0.9, 0.9], [0.9, 0.9]).verdict == "no effect"
