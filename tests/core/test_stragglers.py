"""Who is named as the rank that the others wait for, and who is not."""

from __future__ import annotations

import random

import pytest

from surefoot.core.ranks.stragglers import (
    Pace,
    Straggler,
    StragglerWatch,
    explain,
    find_lags,
    find_stragglers,
    find_window,
    min_slow_steps,
)

EVEN = Pace(0.001, 0.1, 0.001, 8.0, 80.0, 800.0)


def steps(
    num_steps: int, num_ranks: int, noise: float, seed: int, slow: dict[int, float] | None = None
) -> list[list[Pace]]:
    """Paces whose compute is spread by so much, of ranks of which some are slowed by a factor."""
    draws = random.Random(seed)
    return [
        [
            EVEN._replace(
                compute_s=0.1 * (slow or {}).get(rank, 1.0) * draws.lognormvariate(0, noise)
            )
            for rank in range(num_ranks)
        ]
        for _ in range(num_steps)
    ]


def watched(rows: list[list[Pace]]) -> list[tuple[int, Straggler]]:
    watch = StragglerWatch()
    return [
        (number, each) for number, paces in enumerate(rows, start=1) for each in watch.add(paces)[0]
    ]


@pytest.mark.quick("0.0-2", "0.05-2", "0.05-8")
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_rank_that_is_slowed_by_30_percent_is_named_within_20_steps(
    num_ranks: int, noise: float
) -> None:
    for seed in range(20):
        even, slowed = (
            steps(40, num_ranks, noise, seed),
            steps(40, num_ranks, noise, seed + 100, {1: 1.3}),
        )
        found = watched(even + slowed)
        assert [each.rank for _, each in found] == [1]
        ((when, named),) = found
        assert 40 < when <= 60
        assert (named.cause, named.num_steps) == ("compute", 20)
        assert named.waited_s == pytest.approx(0.03, rel=0.3)
        assert watched(slowed)[0][0] <= 20  # from the start of a run as well


@pytest.mark.quick("2-0.3-0", "2-1.0-4", "8-0.3-0")
@pytest.mark.parametrize(
    ("num_ranks", "noise", "most"),
    [(2, 0.05, 0), (2, 0.3, 0), (2, 1.0, 4), (8, 0.3, 0), (8, 1.0, 0)],
)
def test_ranks_that_are_slowest_in_turn_are_not_named(
    num_ranks: int, noise: float, most: int
) -> None:
    """After each of 20,000 steps. A spread of 1.0 is one by a factor of 2.7 either way."""
    assert len(watched(steps(20_000, num_ranks, noise, 7))) <= most


def test_a_rank_at_the_margin_is_named_no_more_often_than_the_bound_says() -> None:
    """The worst case: an excess whose median is just the margin."""
    windows = [
        steps(20, 2, 0.2, seed, {0: 1.1 * 0.102 / 0.1 - 0.002 / 0.1}) for seed in range(2000)
    ]
    named = [each.rank for window in windows for each in find_stragglers(window)]
    assert named.count(0) <= 3  # 211 in 2 ** 20 of 2,000 are 0.4
    assert not named.count(1)


def test_in_one_step_much_is_not_enough_and_in_all_steps_little_is_not_either() -> None:
    once = [[EVEN, EVEN] for _ in range(19)] + [[EVEN, EVEN._replace(compute_s=60.0)]]
    assert find_stragglers(once) == []
    assert find_stragglers([[EVEN, EVEN._replace(compute_s=0.109)]] * 20) == []
    quick = EVEN._replace(data_s=0.0, compute_s=0.002, other_s=0.0)
    assert find_stragglers([[quick, quick._replace(compute_s=0.0029)]] * 20) == []


def test_a_save_between_two_steps_is_not_taken_for_the_reason_of_the_others() -> None:
    slow = EVEN._replace(compute_s=0.13)
    (named,) = find_stragglers([[EVEN, slow]] * 19 + [[EVEN, slow._replace(other_s=5.0)]])
    assert (named.cause, named.waited_s) == ("compute", pytest.approx(0.03))


def test_of_eight_ranks_three_slow_ones_are_all_named() -> None:
    found = find_stragglers(steps(20, 8, 0.02, 1, {2: 1.3, 5: 1.5, 6: 1.4}))
    assert [each.rank for each in found] == [5, 6, 2]


@pytest.mark.parametrize(
    ("paces", "cause", "words"),
    [
        (
            EVEN._replace(data_s=0.051),
            "data",
            "it waits for data 51 ms a step, the others 1 ms",
        ),
        (
            EVEN._replace(compute_s=0.13),
            "compute",
            "it computes 1.3 times as long, for just as much work",
        ),
        (
            EVEN._replace(compute_s=0.15, num_items=120),
            "work",
            "it has 1.5 times as many items, and computes 1.5 times as long",
        ),
        (
            EVEN._replace(compute_s=0.2, num_samples=16),
            "work",
            "it has 2 times as many samples, and computes 2 times as long",
        ),
        (
            EVEN._replace(compute_s=0.15, num_numbers=1200),
            "work",
            "1.5 times as many elements in its batches",
        ),
        (
            EVEN._replace(compute_s=0.15, num_items=84),
            "compute",
            "it computes 1.5 times as long, for 1.05 times as much work",
        ),
        (
            EVEN._replace(other_s=0.05),
            "other",
            "it spends 50 ms between two steps, the others 1 ms",
        ),
    ],
)
def test_data_that_come_late_more_work_and_slow_computing_are_told_apart(
    paces: Pace, cause: str, words: str
) -> None:
    assert explain(paces, EVEN)[0] == cause
    assert words in explain(paces, EVEN)[1]
    ((_, named),) = watched([[EVEN, paces, EVEN]] * 20)
    assert named.rank == 1
    assert named.cause == cause


def test_another_cause_is_told_and_so_is_a_rank_that_keeps_up_again() -> None:
    slow, late = EVEN._replace(compute_s=0.13), EVEN._replace(data_s=0.06)
    watch = StragglerWatch()
    told = [
        watch.add([EVEN, paces]) for paces in [slow] * 30 + [late] * 30 + [EVEN] * 30 + [slow] * 30
    ]
    assert [each.cause for named, _ in told for each in named] == ["compute", "data", "compute"]
    assert [over for _, over in told if over] == [[1]]


def test_the_median_of_the_others_is_that_of_all_but_the_rank_itself() -> None:
    assert find_lags([5.0, 1.0, 2.0, 9.0]) == [3.0, -4.0, -3.0, 7.0]
    assert find_lags([1.0, 1.0]) == [0.0, 0.0]


def test_more_ranks_ask_for_more_steps() -> None:
    assert [find_window(num) for num in (2, 1000, 4096)] == [20, 20, 22]
    assert [min_slow_steps(num, find_window(num)) for num in (2, 1000, 4096)] == [18, 20, 22]
    assert [min_slow_steps(2, num) for num in (10, 11, 1000, 1001)] == [10, 11, 553, 554]
