"""What to compute again within a budget of bytes.

Never above it, as fast as the best of all choices, never slower with more.
"""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import SpecError
from surefoot.core.recompute import (
    RecomputeChoice,
    RecomputeCost,
    choose,
    peak_bytes,
    smallest_budget,
)
from surefoot.core.units import parse_bytes

COST = st.builds(
    RecomputeCost, st.just("block"), st.integers(0, 50), st.integers(0, 500), st.floats(0.0, 1.0)
)


def time_of(costs: list[RecomputeCost], again: frozenset[int]) -> float:
    return sum(costs[number].again_s for number in again)


def best_of_all(costs: list[RecomputeCost], budget_bytes: int) -> float:
    every = (
        frozenset(some)
        for size in range(len(costs) + 1)
        for some in combinations(range(len(costs)), size)
    )
    return min(time_of(costs, again) for again in every if peak_bytes(costs, again) <= budget_bytes)


@given(st.lists(COST, min_size=1, max_size=8), st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_the_choice_fits_and_no_other_that_fits_is_faster(
    costs: list[RecomputeCost], share: float
) -> None:
    least, whole = smallest_budget(costs), peak_bytes(costs, ())
    budget = least + int(share * max(0, whole - least))
    again = choose(costs, budget)
    assert peak_bytes(costs, again) <= budget
    best = best_of_all(costs, budget)
    assert time_of(costs, again) <= best + len(costs) * sum(cost.again_s for cost in costs) / 2**13
    assert choose(costs, budget) == again


@given(st.lists(COST, min_size=1, max_size=24), st.lists(st.floats(0, 1.2), min_size=2, max_size=6))
@settings(max_examples=50, deadline=None)
def test_a_larger_budget_never_takes_more_time(
    costs: list[RecomputeCost], shares: list[float]
) -> None:
    least, whole = smallest_budget(costs), peak_bytes(costs, ())
    budgets = sorted(least + int(share * max(0, whole - least)) for share in shares)
    unit = sum(cost.again_s for cost in costs) / 2**13
    times = [time_of(costs, choose(costs, budget)) for budget in budgets]
    assert all(more <= less + unit * len(costs) for less, more in pairwise(times))


def test_what_fits_whole_is_kept_whole_and_what_can_never_fit_is_told_with_the_least_that_can() -> (
    None
):
    costs = [RecomputeCost("a", 1 << 20, 9 << 20, 0.5), RecomputeCost("b", 2 << 20, 20 << 20, 0.1)]
    assert choose(costs, peak_bytes(costs, ())) == frozenset()
    least = smallest_budget(costs)
    assert least == (1 + 22) << 20
    assert choose(costs, least) == {0}
    with pytest.raises(
        SpecError, match=r"memory.activation_checkpointing is 23 MiB, and the blocks hold 23 MiB"
    ) as raised:
        choose(costs, least - 1)
    told = re.search(r'use "([^"]+)"', str(raised.value.hint))
    assert told is not None
    assert choose(costs, parse_bytes(told[1])) == {0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "some",
        "every",
        "every 0",
        "every -1",
        "every two",
        "12",
        "12 MB/s",
        "full ",
        "FULL",
        None,
        3,
    ],
)
def test_what_is_no_way_to_recompute_is_refused_with_what_is(text: Any) -> None:
    with pytest.raises(
        SpecError, match=r"is not a value of memory\.activation_checkpointing"
    ) as raised:
        RecomputeChoice.parse(text)
    assert '"every 2"' in str(raised.value.hint)
