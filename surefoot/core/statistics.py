"""Statistics: means, medians, quantiles, confidence intervals and paired comparisons.

Every random draw is seeded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import InputError
from surefoot.core.units import format_number

CONFIDENCE = 0.95
RESAMPLES = 4000
MAD_TO_SD = 1.4826  # median absolute deviation of a normal distribution, in standard deviations
# per side, over all looks of a trial: of 100 series of 20 trials without effect, 3 show one twice
FALSE_CALL = 0.015
# when a trial that may stop early is tested: after 7 pairs, then after every 4 more
FIRST_LOOK, LOOK_EVERY = 7, 4
_BLOCK = 1 << 22  # resampled values held at once

Verdict = Literal["no effect", "higher", "lower", "too few"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Median or mean of a sample, with its 95 % confidence interval.

    `low` and `high` are None if there are too few values for an interval. `neutral` is the value
    that means no effect: 1 for a ratio, 0 for a difference. `count` is the number of values.
    """

    estimate: float
    low: float | None
    high: float | None
    count: int
    neutral: float

    @property
    def verdict(self) -> Verdict:
        """Conclusion from the interval alone: the estimate does not matter.

        "no effect" means that the interval includes the neutral value, "higher" or "lower" that it
        is on one side of that value, and "too few" that there is no interval.
        """
        if self.low is None or self.high is None:
            return "too few"
        if self.low <= self.neutral <= self.high:
            return "no effect"
        return "higher" if self.low > self.neutral else "lower"

    def __str__(self) -> str:
        bounds = (
            f"{format_number(self.low)} to {format_number(self.high)}"
            if self.low is not None
            else format_number(None)
        )
        return f"{format_number(self.estimate)} ({bounds}, n = {self.count})"


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean.

    As all functions of this module that take values, it raises InputError if there are none, or if
    one of them is not finite.
    """
    return float(_check_values(values).mean())


def standard_deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (divisor n - 1); None for a single value.

    >>> standard_deviation([2, 4, 4, 4, 5, 5, 7, 9]), standard_deviation([1])
    (2.138089935299395, None)
    """
    checked = _check_values(values)
    return float(checked.std(ddof=1)) if len(checked) > 1 else None


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two middle values.

    >>> median([3, 1, 2]), median([4, 1, 2, 3])
    (2.0, 2.5)
    """
    return float(np.median(_check_values(values)))


def quantiles(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return the quantiles at `shares` (each from 0 to 1), interpolated linearly.

    This is type 7 of Hyndman and Fan 1996, the default of numpy. Raises InputError for a share out
    of range.

    >>> quantiles([1, 2, 3, 4, 5], [0, 0.5, 0.9, 1])
    [1.0, 3.0, 4.6, 5.0]
    """
    if not all(0 <= share <= 1 for share in shares):
        raise InputError(
            f"the quantiles {list(shares)} are not all from 0 to 1", hint="0.5 is the median"
        )
    return [float(value) for value in np.quantile(_check_values(values), shares)]


def bootstrap_median(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median, as (low, high).

    The method is the percentile method of Efron 1979, with 4,000 seeded resamples.

    >>> bootstrap_median([1, 2, 3, 4, 5, 6, 7, 8, 9])
    (2.0, 8.0)
    """
    checked = np.sort(
        _check_values(values)
    )  # the result must not depend on the order of the values
    generator = np.random.default_rng(seed)
    rows = max(1, _BLOCK // len(checked))
    sizes = [min(rows, RESAMPLES - done) for done in range(0, RESAMPLES, rows)]
    medians = [
        np.median(checked[generator.integers(0, len(checked), (size, len(checked)))], axis=1)
        for size in sizes
    ]
    low, high = np.quantile(np.concatenate(medians), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def sign_test_rank(count: int) -> int | None:
    """Return the rank of the bounds of the sign test's 95 % interval of the median.

    For rank k, counted from 0, the interval is from the k-th smallest to the k-th largest of
    `count` values. The result is the largest k for which this interval contains the true median
    with a probability of at least 95 %. The probability follows from coin tosses: k or fewer values
    are below the median as often as k or fewer of `count` coins show heads. None for fewer than six
    values, which have no such interval.

    >>> [sign_test_rank(count) for count in (5, 6, 9, 15)]
    [None, 0, 1, 3]
    """
    if count >= 1000:
        # the normal approximation, one rank wider; 0.5^n leaves float64's range from n = 1075 on
        return math.floor(count / 2 - 1.96 * math.sqrt(count) / 2) - 1
    term, tail, rank = 0.5**count, 0.0, None
    for k in range(count // 2):
        tail += term
        if 2 * tail > 1 - CONFIDENCE:
            break
        rank = k
        term *= (count - k) / (k + 1)
    return rank


def median_interval(values: Sequence[float], *, neutral: float = 0.0, seed: int = 0) -> Interval:
    """Return the median with a 95 % interval whose coverage is at least 95 % for every sample size.

    The interval is that of the percentile bootstrap, extended to the exact interval of the sign
    test if the latter is wider. The bootstrap alone covers the true median in only 87 % of samples
    of 7 values, and in 93 % of samples of 15 values. Fewer than six values have no interval: the
    smallest and the largest of five values enclose the median in only 93.75 % of samples.

    >>> print(median_interval([0.97, 0.99, 0.98, 0.96, 0.97, 0.98, 0.99, 0.97], neutral=1.0))
    0.975 (0.96 to 0.99, n = 8)
    """
    checked = np.sort(_check_values(values))
    count, estimate = len(checked), float(np.median(checked))
    rank = sign_test_rank(count)
    if rank is None:
        return Interval(estimate=estimate, low=None, high=None, count=count, neutral=neutral)
    low, high = bootstrap_median(values, seed=seed)
    low, high = min(low, float(checked[rank])), max(high, float(checked[count - 1 - rank]))
    return Interval(estimate=estimate, low=low, high=high, count=count, neutral=neutral)


def paired_ratio(
    candidate: Sequence[float], baseline: Sequence[float], *, seed: int = 0
) -> Interval:
    """Return the median of candidate / baseline over pairs, with its 95 % interval.

    The two values of a pair are measured side by side, so that an effect on both, such as a
    computer that slows down, cancels out. A ratio of 1 means no effect; below 1 the candidate is
    smaller. Raises InputError for unequal lengths, or for values that are not above 0.

    >>> paired_ratio([5, 10, 20, 40, 5, 10], [10, 20, 40, 80, 10, 20]).estimate
    0.5
    """
    above, below = _pairs(candidate, baseline)
    if above.min() <= 0 or below.min() <= 0:
        raise InputError(
            "a ratio needs values above 0", hint="measure longer, or compare differences"
        )
    return median_interval((above / below).tolist(), neutral=1.0, seed=seed)


def paired_difference(
    candidate: Sequence[float], baseline: Sequence[float], *, seed: int = 0
) -> Interval:
    """Return the median of candidate - baseline over pairs, with its 95 % interval.

    The two values of a pair are, for example, the scores of both variants with the same seed. A
    difference of 0 means no effect. Raises InputError for unequal lengths.

    >>> paired_difference([3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6]).verdict
    'higher'
    """
    first, second = _pairs(candidate, baseline)
    return median_interval((first - second).tolist(), neutral=0.0, seed=seed)


@functools.cache
def looks(most: int) -> dict[int, int]:
    """Return {number of pairs: rank of the interval} for each test of a trial.

    The trial has at most `most` pairs. It is tested after these numbers of pairs, and may stop at
    each test. After n pairs with rank k, the verdict is "lower" if at most k of the n ratios are
    above 1; "higher" is symmetric. Without an effect, each ratio is above 1 with a probability of
    1/2, so the probability of a wrong verdict is computed exactly, over all sequences of coin
    tosses. Each k is the largest for which the probability of a wrong verdict, at any of the tests
    so far, is at most 1.5 % per side.

    This is a group-sequential sign test (Pocock 1977). A fixed interval that is tested repeatedly
    until it shows an effect is wrong far more often than its level.

    >>> looks(15), looks(6)
    ({7: 0, 11: 1, 15: 2}, {})
    """
    found: dict[int, int] = {}
    # number of heads so far -> the share of sequences with that number that were not stopped
    going = {0: 1.0}
    spent = 0.0
    for count in range(1, most + 1):
        thrown: dict[int, float] = {}
        for heads, share in going.items():
            for more in (0, 1):
                thrown[heads + more] = thrown.get(heads + more, 0.0) + share / 2
        going = thrown
        if count < FIRST_LOOK or (count - FIRST_LOOK) % LOOK_EVERY:
            continue
        tail = 0.0
        for heads in sorted(going):
            tail += going[heads]
            if spent + tail > FALSE_CALL:
                break
            found[count] = heads
        stopped = sum(share for heads, share in going.items() if heads <= found.get(count, -1))
        spent += stopped
        going = {heads: share for heads, share in going.items() if heads > found.get(count, -1)}
    return found


def sequential_ratio(
    candidate: Sequence[float], baseline: Sequence[float], *, most: int
) -> Interval:
    """Return the median of candidate / baseline, with an interval for a trial that may stop early.

    The trial has at most `most` pairs. The bounds of the interval are None unless the number of
    pairs is one after which the trial is tested, as `looks(most)` returns them. Raises InputError
    for unequal lengths, or for values that are not above 0.

    >>> print(sequential_ratio([8, 8, 9, 8, 7, 8, 8], [10] * 7, most=15))
    0.8 (0.7 to 0.9, n = 7)
    """
    above, below = _pairs(candidate, baseline)
    if above.min() <= 0 or below.min() <= 0:
        raise InputError(
            "a ratio needs values above 0", hint="measure longer, or compare differences"
        )
    ratios = np.sort(above / below)
    count, rank = len(ratios), looks(most).get(len(ratios))
    low, high = (
        (None, None) if rank is None else (float(ratios[rank]), float(ratios[count - 1 - rank]))
    )
    return Interval(estimate=float(np.median(ratios)), low=low, high=high, count=count, neutral=1.0)


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `freedom` degrees of freedom.

    The distribution has a closed form for integer degrees: Abramowitz and Stegun 1964, 26.7.3 and
    26.7.4.

    >>> [round(student_quantile(n), 3) for n in (1, 2, 5, 30)]
    [12.706, 4.303, 2.571, 2.042]
    """
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if _student_probability(middle, freedom) > CONFIDENCE else (middle, high)
        )
    return (low + high) / 2


def _student_probability(t: float, freedom: int) -> float:
    """Return the probability of values between -t and t under Student's t distribution."""
    angle = math.atan(t / math.sqrt(freedom))
    term, total = (math.cos(angle), 0.0) if freedom % 2 else (1.0, 0.0)
    for k in range(1 if freedom % 2 == 0 else 2, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    if freedom % 2 == 0:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * total)


def mean_difference(
    candidate: Sequence[float], baseline: Sequence[float], *, paired: bool = False
) -> Interval:
    """Return the mean of candidate - baseline, with its 95 % interval by Student's t.

    It is meant for few runs whose scores have similar variance; 0 means no effect. With `paired`,
    the values with the same index form a pair. Otherwise the interval is Welch's (1947), with the
    degrees of freedom rounded down. If one side has only one value, there is no interval.

    >>> print(mean_difference([3, 4, 5], [1, 2, 3]))
    2 (-0.267 to 4.267, n = 3)
    """
    if paired:
        first, second = _pairs(candidate, baseline)
        differences = first - second
        count, estimate = len(differences), float(differences.mean())
        if count < 2:
            return Interval(estimate=estimate, low=None, high=None, count=count, neutral=0.0)
        reach = student_quantile(count - 1) * float(differences.std(ddof=1)) / math.sqrt(count)
        return Interval(
            estimate=estimate, low=estimate - reach, high=estimate + reach, count=count, neutral=0.0
        )
    ours, theirs = _check_values(candidate), _check_values(baseline)
    count, estimate = min(len(ours), len(theirs)), float(ours.mean() - theirs.mean())
    if count < 2:
        return Interval(estimate=estimate, low=None, high=None, count=count, neutral=0.0)
    one, other = float(ours.var(ddof=1)) / len(ours), float(theirs.var(ddof=1)) / len(theirs)
    if one + other == 0:
        return Interval(estimate=estimate, low=estimate, high=estimate, count=count, neutral=0.0)
    freedom = (one + other) ** 2 / (one**2 / (len(ours) - 1) + other**2 / (len(theirs) - 1))
    reach = student_quantile(max(1, math.floor(freedom + 1e-9))) * math.sqrt(one + other)
    return Interval(
        estimate=estimate, low=estimate - reach, high=estimate + reach, count=count, neutral=0.0
    )


def _pairs(
    candidate: Sequence[float], baseline: Sequence[float]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    if len(candidate) != len(baseline):
        raise InputError(
            f"paired samples need the same count: got {len(candidate)} and {len(baseline)} values",
            hint="drop the pairs with a missing value",
        )
    return _check_values(candidate), _check_values(baseline)


def _check_values(values: Sequence[float]) -> npt.NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise InputError(
            f"values must be a 1-D array of at least one number; got shape {array.shape}",
            hint="give one row of at least one number",
        )
    if not np.isfinite(array).all():
        raise InputError(
            f"{int((~np.isfinite(array)).sum())} of {array.size} values are not finite",
            hint="leave those runs out, and report that",
        )
    return array
