"""Parity gate: checks whether the results of a rung are as good as those of the baseline.

A rung is one optimization of a ladder. The gate compares tensors of both and returns a verdict that
names the worst tensor. The effect of rounding is measured: a further run of the baseline has its
weights, the output of every module and every gradient in the backward pass changed by random shares
of the format's unit (`blur` in `child`). The resulting difference is called a floor. The bound
depends on the kind of the rung:

- *nothing*: loss, gradients and weights after a step, gradients of further batches, and all of
  these after K steps are equal to 1e-5, or differ by at most three floors of 32-bit rounding;
- *rounding*: no gradient differs by more than three floors of the format in which the rung computes
  (2-norm, which also bounds its direction), and neither does the change of the weights over K
  steps.

In both cases no slice of a gradient deviates in the same direction in all batches by more than
three floors. A slice belongs to one output of a layer. Over all batches its component along the
true gradient is (sum of <g, g'>) / (sum of <g, g>). This is 1 if only rounding differs and 0 if the
slice was zeroed, whatever the loss is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from surefoot.core.statistics import Interval, mean_difference, standard_deviation
from surefoot.core.units import format_number, format_percent
from surefoot.prove.ladder.rungs import Kind
from surefoot.trial import compare_arrays
from surefoot.trial.parity import NOISE_FACTOR, TOLERANCE

Arrays = Mapping[str, npt.NDArray[np.generic]]
Numbers = npt.NDArray[np.float64]
# unit in the last place of 1.0
UNITS = {"fp32": 2.0**-23, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "float8": 2.0**-4}
# share of the mean slice: a smaller slice is compared with this share, since it is mostly rounding
SMALL_SLICE = 0.25
SPREADS = 2.0  # a score may be worse by 2 standard deviations of the baseline's scores
MIN_SEEDS = 3
FURTHER = 2  # times as many further seeds if the first scores are worse


def unit_of(compute: str) -> float:
    """Return the unit in the last place of a format at 1.0; that of bf16 for an unknown format."""
    return UNITS.get(compute, UNITS["bf16"])


def bound_of(kind: Kind, compute: str) -> tuple[Kind, float]:
    """Return the bound for a rung (optimization) whose spec computes in `compute`, and its unit.

    A rung of the kind "nothing" gets the bound "rounding" if its spec does not compute in fp32.
    """
    if kind == "nothing" and compute == "fp32":
        return kind, UNITS["fp32"]
    return "rounding", unit_of(compute)


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Comparison in which `what` differs by `off`, while a difference of `allowed` is allowed."""

    what: str
    off: float
    allowed: float

    @property
    def share(self) -> float:
        if np.isnan(self.off):
            return float("inf")
        return self.off / self.allowed if self.allowed else (0.0 if self.off == 0 else float("inf"))


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """Verdict of the parity gate, which compares the results of an optimization with the baseline.

    `claims` are the comparisons, the worst first. `worst` is the ratio of `off` to `allowed` of the
    first one.
    """

    verdict: Literal["passes", "fails", "does not apply", "not measured"]
    words: str
    worst: float | None = None
    claims: tuple[Deviation, ...] = ()


def judge(kind: Kind, start: Arrays, blurred: Arrays, rung: Arrays) -> GateVerdict:
    """Return the verdict on the tensors of an optimization (rung), compared with the baseline.

    Args:
        kind: Largest change of the results that is allowed.
        start: Tensors of the baseline.
        blurred: Tensors of the baseline under simulated rounding. If they are missing, or not
            finite where the baseline is, no rounding is allowed, since such tensors would allow
            anything.
        rung: Tensors of the rung.
    """
    if kind == "algorithm":
        return GateVerdict(
            verdict="does not apply",
            words="another algorithm has other gradients: its score decides",
        )
    unlike = sorted(start.keys() ^ rung.keys())
    if unlike:
        return GateVerdict(
            verdict="fails", words=f"{unlike[0]} is missing in one of the two", worst=float("inf")
        )
    shapes = [name for name in start if start[name].shape != rung[name].shape]
    if shapes:
        words = (
            f"{shapes[0]} has the shape {rung[shapes[0]].shape}, "
            f"the start's {start[shapes[0]].shape}"
        )
        return GateVerdict(verdict="fails", words=words, worst=float("inf"))
    has_floor = _has_floor(start, blurred)
    floor = blurred if has_floor else start
    claims = [
        *_slices(start, floor, rung),
        *(
            _check_equality(start, floor, rung)
            if kind == "nothing"
            else _check_closeness(start, floor, rung)
        ),
    ]
    claims.sort(key=lambda claim: claim.share, reverse=True)
    worst = claims[0]
    fails = worst.share > 1
    words = (
        f"{worst.what} is off by {format_number(worst.off)}, "
        f"{format_number(worst.allowed)} is allowed"
    )
    if not fails:
        words = f"{len(claims)} comparisons hold; the nearest to its bound: {words}"
    if not has_floor:
        words += ", since what rounding comes to here could not be measured"
    return GateVerdict(
        verdict="fails" if fails else "passes", words=words, worst=worst.share, claims=tuple(claims)
    )


def _has_floor(start: Arrays, blurred: Arrays) -> bool:
    """Return whether simulated rounding left everything finite that is finite in the baseline."""
    return start.keys() == blurred.keys() and all(
        np.isfinite(_to_fp64(blurred[name])[np.isfinite(_to_fp64(start[name]))]).all()
        for name in start
    )


def _check_equality(start: Arrays, blurred: Arrays, rung: Arrays) -> Iterator[Deviation]:
    least = _floors_of_losses(start, blurred)
    for gap in compare_arrays(start, blurred, rung):
        allowed = max(gap.tolerance, NOISE_FACTOR * max(gap.floor or 0.0, least.get(gap.name, 0.0)))
        off = float("inf") if gap.distance is None else gap.distance
        yield Deviation(what=_describe_key(gap.name), off=off, allowed=allowed)


def _floors_of_losses(start: Arrays, blurred: Arrays) -> dict[str, float]:
    """Return a lower limit of the floor of each loss.

    A loss is one value, so that the floor of a single draw may be close to zero by chance. The
    limit follows from the weights: the share by which rounding changes their total movement is also
    allowed for the decrease of the loss.
    """
    length = _norm(_weight_change(start))
    if not length:
        return {}
    share = _norm(_weight_change(blurred) - _weight_change(start)) / length
    losses = {
        name: float(_to_fp64(start[name]).sum()) for name in start if name.startswith("loss/")
    }
    first = losses.get("loss/1", 0.0)
    return {name: share * abs(loss - first) / abs(loss) for name, loss in losses.items() if loss}


def _check_closeness(start: Arrays, blurred: Arrays, rung: Arrays) -> Iterator[Deviation]:
    """Compare each gradient as a whole, and the change of the weights after the first step."""
    for number, name in _gradients(start):
        key = f"batch/{number}/{name}"
        scale = max(
            _norm(start[key]),
            1e-3 * _typical_gradient(start, number) * float(np.sqrt(start[key].size)),
        )
        if scale:
            off, floor = (
                _norm(_to_fp64(other[key]) - _to_fp64(start[key])) / scale
                for other in (rung, blurred)
            )
            yield Deviation(
                what=f"the gradient of {name} in batch {number + 1}",
                off=off,
                allowed=max(NOISE_FACTOR * floor, TOLERANCE),
            )
    way = _weight_change(start)
    length = _norm(way)
    if length:
        off, floor = (_norm(_weight_change(other) - way) / length for other in (rung, blurred))
        yield Deviation(
            what="the way of the weights after the first step",
            off=off,
            allowed=max(NOISE_FACTOR * floor, TOLERANCE),
        )


def _slices(start: Arrays, blurred: Arrays, rung: Arrays) -> Iterator[Deviation]:
    """Compare the worst slice of each gradient: the deviation that is the same in all batches."""
    names = dict.fromkeys(name for _, name in _gradients(start))
    floors = {name: float(np.abs(_relative_length(start, blurred, name)).max()) for name in names}
    usual = float(np.median(list(floors.values()))) if floors else 0.0
    for name in names:
        lean = np.abs(_relative_length(start, rung, name))
        worst = int(lean.argmax())
        allowed = max(NOISE_FACTOR * max(floors[name], usual), TOLERANCE)
        yield Deviation(
            what=f"slice {worst} of the gradient of {name}, over all batches,",
            off=float(lean[worst]),
            allowed=allowed,
        )


def _relative_length(start: Arrays, other: Arrays, name: str) -> Numbers:
    """Return the excess of each slice of a gradient along the true gradient, over all batches.

    The excess is a share of the true gradient.
    """
    above, below, least = 0.0, 0.0, 0.0
    numbers = [number for number, each in _gradients(start) if each == name]
    for number in numbers:
        key = f"batch/{number}/{name}"
        true, mine = (
            _to_fp64(arrays[key]).reshape(arrays[key].shape[0] if arrays[key].ndim else 1, -1)
            for arrays in (start, other)
        )
        above = above + ((mine - true) * true).sum(axis=1)
        below = below + (true * true).sum(axis=1)
        least += (1e-3 * _typical_gradient(start, number)) ** 2 * true.shape[1]
    scale = np.maximum(below, max(SMALL_SLICE**2 * float(np.mean(below)), least))
    lean: Numbers = np.where(scale > 0, above / np.where(scale > 0, scale, 1.0), 0.0)
    return np.where(np.isfinite(lean), lean, np.inf)


def _gradients(arrays: Arrays) -> list[tuple[int, str]]:
    """Return (number of the batch, parameter) of each gradient taken after a first step."""
    parts = [key.split("/", 2) for key in arrays if key.startswith("batch/")]
    return [(int(number), name) for _, number, name in parts]


def _typical_gradient(arrays: Arrays, number: int) -> float:
    """Return the largest root mean square among a batch's gradients.

    Values far below it are mostly rounding errors.
    """
    found = [
        _norm(each) / np.sqrt(each.size)
        for key, each in arrays.items()
        if key.startswith(f"batch/{number}/") and each.size
    ]
    return float(max(found, default=0.0))


def _weight_change(arrays: Arrays) -> Numbers:
    """Return the change of all trained weights from the first to the last step, as one vector."""
    names = dict.fromkeys(name for _, name in _gradients(arrays))
    last = max(int(key.split("/")[1]) for key in arrays if key.startswith("weight/"))
    ways = [
        _to_fp64(arrays[f"weight/{last}/{name}"]) - _to_fp64(arrays[f"weight/1/{name}"])
        for name in names
    ]
    return np.concatenate([way.ravel() for way in ways])


def _to_fp64(array: npt.NDArray[np.generic]) -> Numbers:
    return array.astype(np.float64)


def _norm(array: npt.NDArray[np.generic]) -> float:
    return float(np.linalg.norm(_to_fp64(array).ravel()))


def _describe_key(key: str) -> str:
    """Describe a key such as `gradient/8/0.weight` in words."""
    what, _, rest = key.partition("/")
    number, _, name = rest.partition("/")
    if what == "batch":
        return f"the gradient of {name} in batch {int(number) + 1}"
    return f"the {what}{f' of {name}' if name else ''} after step {number}"


@dataclass(frozen=True, kw_only=True)
class Score:
    """Scores of an optimization (rung) compared with those of the baseline, seed by seed.

    `spread` is the standard deviation of the baseline's scores.
    """

    name: str
    better: str
    unit: str
    start: float
    value: float
    difference: Interval
    spread: float | None

    @property
    def words(self) -> str:
        """The comparison of the scores as a sentence."""
        show = format_percent if self.unit == "%" else format_number
        both = (
            f"{self.name} after the same samples is {show(self.value)}, "
            f"the start's {show(self.start)}"
        )
        return f"{both}, whose own runs scatter by {show(self.spread)}"

    @property
    def is_worse(self) -> bool:
        """True if the interval shows a worse score, or a mean worse by over twice the spread."""
        sign = 1.0 if self.better == "higher" else -1.0
        if self.difference.verdict == ("lower" if sign > 0 else "higher"):
            return True
        return (
            self.spread is not None
            and self.spread > 0
            and -sign * self.difference.estimate > SPREADS * self.spread
        )


@dataclass(frozen=True)
class SeedScores:
    """Scores of runs by seed, with the name, direction and unit of the score."""

    values: Mapping[int, float]
    name: str
    better: str
    unit: str


def decide_by_scores(
    seeds: range, take: Callable[[range], tuple[SeedScores | None, SeedScores | None]]
) -> Score | None:
    """Compare the scores of `seeds`; if they look worse, decide by further seeds as well.

    `take` returns the scores of the baseline and of the rung (optimization) for some seeds. With
    three seeds, a rung that changes nothing looks worse in 3 to 8 of 100 cases; the less its runs
    correlate with those of the baseline, the more often. With all nine seeds it looks worse in at
    most 1 of 100.
    """
    start, rung = take(seeds)
    score = compare_scores(start, rung)
    if score is None or not score.is_worse:
        return score
    more, theirs = take(range(seeds.stop, seeds.stop + FURTHER * len(seeds)))
    return compare_scores(_join(start, more), _join(rung, theirs))


def _join(some: SeedScores | None, more: SeedScores | None) -> SeedScores | None:
    """Join the scores of two sets of seeds; if one is None, return the other."""
    if some is None or more is None:
        return some or more
    return replace(some, values={**some.values, **more.values})


def compare_scores(start: SeedScores | None, rung: SeedScores | None) -> Score | None:
    """Compare the scores of a rung (optimization) and the baseline for the seeds that both have.

    Returns None if there are none.
    """
    shared = (
        sorted(start.values.keys() & rung.values.keys())
        if start is not None and rung is not None
        else []
    )
    if start is None or rung is None or not shared:
        return None
    mine, theirs = [rung.values[seed] for seed in shared], [start.values[seed] for seed in shared]
    return Score(
        name=start.name,
        better=start.better,
        unit=start.unit,
        start=float(np.mean(theirs)),
        value=float(np.mean(mine)),
        difference=mean_difference(mine, theirs, paired=True),
        spread=standard_deviation(theirs),
    )
