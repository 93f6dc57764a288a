"""Stragglers: which rank is last in synchronized steps, how often, at what cost and why.

**The rule.** The busy time of a rank in a step is the time in which it does not wait for other
ranks: data, forward and backward passes, update, and the time between two steps. A rank is *behind*
in a step if its busy time is over 10 % and over 1 ms longer than the median of the other ranks.

Suppose that the true median excess of a rank is not above these limits. Then the rank is behind in
at most every second step, and in k or more of n steps with a probability of at most P(Binomial(n,
1/2) >= k). This is a sign test, which assumes nothing about the noise except that steps are
independent. A rank is reported if this probability, times the number of ranks, is at most 1 in
1,000. That is 18 of the last 20 steps for 2 ranks, 19 for 8 ranks, and all 20 for 64 ranks. Ranks
that are last in turn are not reported, because each is last in only 1 / ranks of the steps.

The test is repeated after each step, which raises its false alarm rate. With 2 ranks whose step
times vary by a factor of 2.7 up or down, one rank was reported in 10,000 steps; with a factor of
1.35 none was reported in 20,000 steps.

Other tools use a threshold for the ratio of a rank's median time to that of the fastest rank
(NVIDIA's resiliency extension), or print the slowest and the fastest rank of an interval
(Megatron). Neither states how often that happens by noise alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, median
from typing import Literal, NamedTuple

from surefoot.core.units import format_number, format_percent, format_seconds

WINDOW = 20  # steps
MARGIN, MIN_S = 0.1, 0.001  # share of the others' time, and the noise of the system in seconds
FALSE_CALL = 0.001  # false alarms for any rank in one window
EXACT = 1000  # steps up to which the binomial is summed exactly
SKIPPED = 1  # first steps of an attempt, in which ranks start up

Cause = Literal["data", "work", "compute", "other"]
ADVICE: Mapping[Cause, str] = {
    "data": "raise loader.workers, or check the disk of that rank",
    "work": "give all ranks samples of similar length, or use more microbatches",
    "compute": "check that rank's processor: clock frequency, temperature, other processes",
    "other": "save and record less often, or move the code of the loop between steps",
}


class Pace(NamedTuple):
    """Time that one rank spent in a step, without waiting for other ranks, and its amount of work.

    `data_s` was spent getting samples, `compute_s` on forward and backward passes and the update,
    and `other_s` between two steps, in seconds. `num_items` is the number of items in the loss of
    the rank, such as tokens. `num_numbers` is the number of elements of its batches, including
    padding.
    """

    data_s: float
    compute_s: float
    other_s: float
    num_samples: float
    num_items: float
    num_numbers: float

    @property
    def busy_s(self) -> float:
        return self.data_s + self.compute_s + self.other_s


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Rank that was slower than the other ranks in `num_behind` of `num_steps` steps.

    Slower means that its time was over 10 % and over 1 ms above the median of the other ranks.
    `waited_s` is the median of this excess over all steps, in seconds, and `share` is `waited_s` as
    a fraction of the time of the other ranks. `why` explains the cause in words.
    """

    rank: int
    num_behind: int
    num_steps: int
    waited_s: float
    share: float
    cause: Cause
    why: str

    @property
    def words(self) -> str:
        often = f"in {self.num_behind:,} of {self.num_steps:,} steps"
        cost = (
            f"{format_seconds(self.waited_s)} a step, {format_percent(self.share)} of the "
            "step time of the others"
        )
        return f"the other ranks wait for rank {self.rank} {often}, {cost}: {self.why}"


def find_window(num_ranks: int) -> int:
    """Return over how many of the most recent steps stragglers are detected.

    It is 20. For more than about 1,000 ranks it is the smallest number with which a rank can be
    reported.
    """
    return max(WINDOW, math.ceil(math.log2(num_ranks / FALSE_CALL)))


@cache
def min_slow_steps(num_ranks: int, num_steps: int = WINDOW) -> int:
    """Return in how many of `num_steps` steps a rank must be slower than the others to be reported.

    The result is `num_steps` if there are too few steps to report any of `num_ranks` ranks.

    >>> [min_slow_steps(ranks) for ranks in (2, 8, 64)], min_slow_steps(2, 10_000)
    ([18, 19, 20], 5166)
    """
    allowed = FALSE_CALL / num_ranks
    if num_steps > EXACT:
        return math.ceil((num_steps - NormalDist().inv_cdf(allowed) * math.sqrt(num_steps) + 1) / 2)
    # of 2 ** num_steps outcomes, those in which it is behind at least k times
    tail, k = 1, num_steps
    while (tail + math.comb(num_steps, k - 1)) / 2**num_steps <= allowed:
        k -= 1
        tail += math.comb(num_steps, k)
    return k


def find_lags(busy_s: Sequence[float]) -> list[float]:
    """Return for each rank its time minus the median time of the other ranks, in seconds.

    The difference is negative for a rank that is faster.

    >>> find_lags([1.0, 1.0, 4.0]), find_lags([2.0, 3.0])
    ([-1.5, -1.5, 3.0], [-1.0, 1.0])
    """
    return [each - other for each, other in zip(busy_s, _medians_of_others(busy_s), strict=True)]


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the median of all other values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    count = len(values) - 1
    low, high = (count - 1) // 2, count // 2
    found = [0.0] * len(values)
    for place, index in enumerate(order):  # without the value itself, those after it move up
        found[index] = (
            values[order[low + (low >= place)]] + values[order[high + (high >= place)]]
        ) / 2
    return found


def find_behind(busy_s: Sequence[float]) -> frozenset[int]:
    """Return the ranks whose time exceeds the median of the others by over 10 % and over 1 ms."""
    if max(busy_s) - min(busy_s) <= MIN_S:
        return frozenset()
    lags = enumerate(find_lags(busy_s))
    return frozenset(
        rank for rank, lag_s in lags if lag_s > max(MARGIN * (busy_s[rank] - lag_s), MIN_S)
    )


def find_stragglers(steps: Sequence[Sequence[Pace]]) -> list[Straggler]:
    """Return the stragglers in these steps, the one that costs the most time first.

    `steps` has one item per step: the `Pace` of every rank. The result is empty if there are too
    few steps.
    """
    if not steps or len(steps[0]) / 2 ** len(steps) > FALSE_CALL:
        return []
    least = min_slow_steps(len(steps[0]), len(steps))
    busy_s = [[pace.busy_s for pace in paces] for paces in steps]
    behind = Counter(rank for row in busy_s for rank in find_behind(row))
    if not any(count >= least for count in behind.values()):
        return []
    lags_s = [find_lags(row) for row in busy_s]
    # medians: one evaluation or save between two steps would outweigh all of them
    typical = [Pace(*map(median, zip(*column, strict=True))) for column in zip(*steps, strict=True)]
    found = [
        name(rank, n, median(row[rank] for row in lags_s), typical, len(steps))
        for rank, n in behind.items()
        if n >= least
    ]
    return sorted(found, key=lambda each: -each.waited_s)


def name(
    rank: int, num_behind: int, waited_s: float, paces: Sequence[Pace], num_steps: int
) -> Straggler:
    """Return the straggler `rank`, with the cause of its delay.

    `paces` has the `Pace` of every rank in a typical step. `waited_s` is the time that the other
    ranks wait for it in each step, in seconds.
    """
    typical = Pace(*(_medians_of_others(column)[rank] for column in zip(*paces, strict=True)))
    cause, why = explain(paces[rank], typical)
    return Straggler(
        rank=rank,
        num_behind=num_behind,
        num_steps=num_steps,
        waited_s=waited_s,
        share=waited_s / typical.busy_s if typical.busy_s > 0 else 0.0,
        cause=cause,
        why=why,
    )


def explain(mine: Pace, others: Pace) -> tuple[Cause, str]:
    """Return the main cause of a rank's delay, and an explanation in words.

    `mine` has the times and the work of the rank, `others` those of the other ranks. The additional
    time of the rank is divided into four parts, and the largest is the cause. Additional compute
    time is attributed to "work" in proportion to the additional work, and the remainder to
    "compute". If time grows faster than the work, as that of attention does with the sequence
    length, there is a remainder too.
    """
    measures = {
        "samples": (mine.num_samples, others.num_samples),
        "items": (mine.num_items, others.num_items),
        "elements in its batches": (mine.num_numbers, others.num_numbers),
    }
    ratios = {unit: own / other for unit, (own, other) in measures.items() if own > other > 0}
    unit = max(ratios, key=ratios.__getitem__, default="")
    times = ratios.get(unit, 1.0)
    longer_s = max(0.0, mine.compute_s - others.compute_s)
    by_work_s = min(longer_s, (times - 1) * others.compute_s)
    parts: dict[Cause, float] = {
        "data": mine.data_s - others.data_s,
        "work": by_work_s,
        "compute": longer_s - by_work_s,
        "other": mine.other_s - others.other_s,
    }
    cause = max(parts, key=parts.__getitem__)
    slower = format_number(mine.compute_s / others.compute_s if others.compute_s > 0 else None)
    words: dict[Cause, str] = {
        "data": (
            f"it waits for data {format_seconds(mine.data_s)} a step, the others "
            f"{format_seconds(others.data_s)}"
        ),
        "work": (
            f"it has {format_number(times)} times as many {unit}, "
            f"and computes {slower} times as long"
        ),
        "compute": f"it computes {slower} times as long, for {_amount(times)} as much work",
        "other": (
            f"it spends {format_seconds(mine.other_s)} between two steps, the others "
            f"{format_seconds(others.other_s)}: saving, records, code of the loop"
        ),
    }
    return cause, words[cause]


def _amount(times: float) -> str:
    return "just" if times < 1.005 else f"{format_number(times)} times"


class StragglerWatch:
    """Detector of stragglers: reports a rank when it becomes a straggler and when it catches up.

    The first step of an attempt is ignored. Later steps are tested as soon as there are enough:
    with 2 ranks, a rank is reported after 11 steps if it was slower in all of them.
    """

    def __init__(self) -> None:
        self._steps: deque[Sequence[Pace]] = deque()
        self._behind: deque[frozenset[int]] = deque()  # the ranks that were behind in each of them
        self._counts: Counter[int] = Counter()
        self._named: dict[int, Cause] = {}
        self._num_seen = 0

    def add(self, paces: Sequence[Pace]) -> tuple[list[Straggler], list[int]]:
        """Add a step, as the `Pace` of each rank; return new stragglers and ranks that caught up.

        A straggler is reported again if its cause changes.
        """
        self._num_seen += 1
        if self._num_seen <= SKIPPED:
            return [], []
        if len(self._steps) == find_window(len(paces)):
            self._steps.popleft()
            self._counts.subtract(self._behind.popleft())
        self._steps.append(paces)
        self._behind.append(find_behind([pace.busy_s for pace in paces]))
        self._counts.update(self._behind[-1])
        if not self._counts or len(paces) / 2 ** len(self._steps) > FALSE_CALL:
            return [], []
        return self._find_stragglers(len(paces))

    def _find_stragglers(self, num_ranks: int) -> tuple[list[Straggler], list[int]]:
        least, fresh = min_slow_steps(num_ranks, len(self._steps)), list[Straggler]()
        if max(self._counts.values()) >= least:
            found = find_stragglers(self._steps)
            fresh = [each for each in found if self._named.get(each.rank) != each.cause]
            self._named |= {each.rank: each.cause for each in fresh}
        # in between nothing is reported: a rank near the margin would be reported again and again
        over = [rank for rank in self._named if 2 * self._counts[rank] < len(self._steps)]
        for rank in over:
            del self._named[rank]
        return fresh, over
