"""Learning-rate curves as pure functions of the step that return a multiplier of the base lr.

`step` counts applied updates from 0: the first update uses curve(0), the last update of a run
curve(total - 1). Lengths are in steps. `floor`, `start` and `final` are fractions of the base
learning rate. After its length a curve keeps its last value.

Curves have no state, so a resumed run continues on the same curve. The only exception is `Plateau`,
an immutable value that holds its state. `core/schedule/plan` makes curves from a spec's [schedule]
table.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from surefoot.core.errors import SpecError

Multiplier = Callable[[int], float]
Shape = Literal["linear", "cosine"]
DecayShape = Literal["linear", "cosine", "sqrt"]
WarmupShape = Literal["linear", "cosine", "exponential"]
BatchRule = Literal["linear", "sqrt"]


def constant(step: int, factor: float = 1.0) -> float:
    """Return `factor` at every step.

    Args:
        step: Number of applied updates, from 0.
        factor: Multiplier of the base learning rate.

    >>> constant(0), constant(10**6, factor=0.1)
    (1.0, 0.1)
    """
    return factor


def linear(step: int, length: int, start: float = 1.0, floor: float = 0.0) -> float:
    """Return start + (floor - start) t/T, a straight line, like torch's LinearLR.

    Args:
        step: Number of applied updates (t), from 0.
        length: Number of steps (T) from `start` to `floor`.
        start: Multiplier at step 0.
        floor: Multiplier from step T on.

    >>> [linear(step, 4) for step in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    return start + (floor - start) * _share(step, length)


def cosine(step: int, length: int, floor: float = 0.0) -> float:
    """Return half a cosine from 1 to `floor`: floor + (1 - floor)/2 (1 + cos(pi t/T)).

    After T steps the value stays at `floor`, but that of torch's CosineAnnealingLR rises again.
    Loshchilov and Hutter 2017, arXiv 1608.03983.

    Args:
        step: Number of applied updates (t), from 0.
        length: Number of steps (T) from 1 to `floor`.
        floor: Multiplier from step T on.

    >>> [round(cosine(step, 4, floor=0.1), 3) for step in (0, 1, 2, 4, 9)]
    [1.0, 0.868, 0.55, 0.1, 0.1]
    """
    return _cosine_between(1.0, floor, _share(step, length))


def cosine_restarts(step: int, first: int, factor: int = 1, floor: float = 0.0) -> float:
    """Return a cosine with warm restarts, like torch's CosineAnnealingWarmRestarts.

    Loshchilov and Hutter 2017, arXiv 1608.03983.

    Args:
        step: Number of applied updates, from 0.
        first: Number of steps of the first cycle.
        factor: Length of each later cycle divided by the length of the cycle before it.
        floor: Multiplier at the end of each cycle.

    >>> [cosine_restarts(step, 10, factor=2) for step in (0, 10, 30, 70)]  # lengths 10, 20, 40
    [1.0, 1.0, 1.0, 1.0]
    >>> round(cosine_restarts(20, 10, factor=2), 3)
    0.5
    """
    length = first
    if factor == 1:
        step %= first
    while step >= length:
        step -= length
        length *= factor
    return cosine(step, length, floor)


def step_decay(step: int, every: int, factor: float = 0.1) -> float:
    """Return factor^floor(t/S), like torch's StepLR.

    Args:
        step: Number of applied updates (t), from 0.
        every: Number of steps (S) between two multiplications by `factor`.
        factor: Factor by which the value is multiplied every S steps.

    >>> [round(step_decay(step, 30), 3) for step in (0, 29, 30, 59, 60)]
    [1.0, 1.0, 0.1, 0.1, 0.01]
    """
    return float(factor ** (step // every))


def multi_step(step: int, milestones: Sequence[int], factor: float = 0.1) -> float:
    """Return the value multiplied by `factor` at each milestone, like torch's MultiStepLR.

    Args:
        step: Number of applied updates, from 0.
        milestones: Steps of the multiplications, in ascending order.
        factor: Factor by which the value is multiplied at each milestone.

    >>> [multi_step(step, [30, 80], factor=0.5) for step in (29, 30, 79, 80)]
    [1.0, 0.5, 0.5, 0.25]
    """
    return float(factor ** bisect_right(milestones, step))


def exponential(step: int, factor: float, every: int = 1) -> float:
    """Return factor^(t/S), a smooth decay; for S = 1 it is torch's ExponentialLR.

    Args:
        step: Number of applied updates (t), from 0.
        factor: Factor by which the value is multiplied over S steps.
        every: Number of steps (S) for one multiplication by `factor`.

    >>> f"{0.1 * exponential(100, 0.95):.1e}", round(exponential(5, 0.25, every=10), 3)
    ('5.9e-04', 0.5)
    """
    return float(factor ** (step / every))


def polynomial(step: int, length: int, power: float = 1.0, floor: float = 0.0) -> float:
    """Return floor + (1 - floor) (1 - t/T)^power, like torch's PolynomialLR with a floor.

    Args:
        step: Number of applied updates (t), from 0.
        length: Number of steps (T) from 1 to `floor`.
        power: Exponent; 1 is a straight line.
        floor: Multiplier from step T on.

    >>> [polynomial(step, 4, power=2) for step in (0, 2, 4, 9)]
    [1.0, 0.25, 0.0, 0.0]
    """
    return floor + (1 - floor) * float((1 - _share(step, length)) ** power)


def inverse_square_root(step: int, timescale: int) -> float:
    """Return sqrt(S / (S + t)).

    After a warm-up of S steps, the value at step s of the run is sqrt(S / s). Vaswani et al. 2017,
    arXiv 1706.03762, section 5.3, scaled so that the peak is 1.

    Args:
        step: Number of applied updates (t), from 0.
        timescale: Number of steps (S) after which the value is sqrt(1/2).

    >>> inverse_square_root(0, 100), inverse_square_root(300, 100)
    (1.0, 0.5)
    """
    return math.sqrt(timescale / (timescale + step))


def warmup(step: int, length: int, shape: WarmupShape = "linear", start: float = 0.01) -> float:
    """Return the multiplier of a warm-up, which rises to 1 over `length` updates.

    Goyal et al. 2017, arXiv 1706.02677, section 2.2, introduced it for large batches.

    Args:
        step: Number of applied updates (t), from 0. The formulas use n = t + 1, so that the
            first update does not have an lr of 0.
        length: Number of updates (T); 0 for no warm-up.
        shape: "linear" is n/T, "cosine" is (1 - cos(pi n/T))/2, "exponential" is start^(1 -
            n/T).
        start: Base of the exponential shape; the other shapes do not use it.

    >>> [warmup(step, 4) for step in (0, 1, 3, 4)], warmup(0, 0)
    ([0.25, 0.5, 1.0, 1.0], 1.0)
    >>> round(warmup(1, 4, "cosine"), 3), round(warmup(1, 4, "exponential", start=0.01), 3)
    (0.5, 0.1)
    """
    share = _share(step + 1, length)
    if shape == "linear":
        return share
    return _cosine_between(0.0, 1.0, share) if shape == "cosine" else float(start ** (1 - share))


def warmup_stable_decay(
    step: int,
    warmup_length: int,
    stable: int,
    decay: int,
    floor: float = 0.0,
    shape: DecayShape = "linear",
) -> float:
    """Return the multiplier of a warm-up, a constant phase at 1 and a decay to `floor`.

    Hu et al. 2024, arXiv 2404.06395. The shapes of the decay are those of Hägele et al. 2024,
    arXiv 2405.18392.

    Args:
        step: Number of applied updates, from 0.
        warmup_length: Number of steps of the warm-up, which is linear.
        stable: Number of steps at 1.
        decay: Number of steps (T) of the decay.
        floor: Multiplier at the end of the decay.
        shape: Shape of the decay: "linear", "cosine", or "sqrt" for 1 - sqrt(t/T).

    >>> [warmup_stable_decay(step, 2, 4, 4) for step in (0, 1, 5, 6, 8, 10)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup_length + stable:
        return warmup(step, warmup_length)
    share = _share(step - warmup_length - stable, decay)
    if shape == "cosine":
        return _cosine_between(1.0, floor, share)
    return 1.0 + (floor - 1.0) * (math.sqrt(share) if shape == "sqrt" else share)


def one_cycle(
    step: int,
    length: int,
    peak: float = 0.3,
    start: float = 0.04,
    final: float = 4e-6,
    shape: Shape = "cosine",
) -> float:
    """Return the multiplier of one cycle: from `start` up to 1, then down to `final`.

    It equals torch's OneCycleLR with pct_start = peak, div_factor = 1/start and final_div_factor =
    start/final. Smith and Topin 2018, arXiv 1708.07120.

    Args:
        step: Number of applied updates, from 0.
        length: Number of updates (T); the last one is step T - 1.
        peak: Fraction of the length at which the maximum is.
        start: Multiplier at step 0.
        final: Multiplier at the last update.
        shape: Shape of both phases: "cosine" or "linear".

    >>> [round(one_cycle(step, 11, peak=6 / 11), 6) for step in (0, 5, 10)]
    [0.04, 1.0, 4e-06]
    """
    return _make_triangle(step, length, peak, (start, 1.0, final), shape)


def one_cycle_momentum(
    step: int,
    length: int,
    peak: float = 0.3,
    low: float = 0.85,
    high: float = 0.95,
    shape: Shape = "cosine",
) -> float:
    """Return the momentum (or Adam's first beta) for `one_cycle`: low where the lr is high.

    The value is the momentum itself, not a multiplier.

    Args:
        step: Number of applied updates, from 0.
        length: Number of updates.
        peak: Fraction of the length at which the momentum is `low`.
        low: Momentum where the learning rate is highest.
        high: Momentum at both ends of the cycle.
        shape: Shape of both phases: "cosine" or "linear".

    >>> [round(one_cycle_momentum(step, 11, peak=6 / 11), 6) for step in (0, 5, 10)]
    [0.95, 0.85, 0.95]
    """
    return _make_triangle(step, length, peak, (high, low, high), shape)


def sequence(pieces: Sequence[tuple[Multiplier, int]], total: int) -> Multiplier:
    """Return a curve that consists of `pieces` one after another, like torch's SequentialLR.

    Each piece counts its own steps from 0.

    Args:
        pieces: (curve, number of steps) of each piece; a curve maps a step to a multiplier.
        total: Number of steps of the run.

    Raises:
        SpecError: If there are no pieces, a piece has no steps, or the lengths do not add up to
            `total`.

    >>> rise, fall = lambda step: warmup(step, 2), lambda step: linear(step, 4)
    >>> curve = sequence([(rise, 2), (constant, 2), (fall, 4)], total=8)
    >>> [curve(step) for step in range(9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    lengths = [length for _, length in pieces]
    if not pieces or min(lengths) < 1 or sum(lengths) != total:
        shown = " + ".join(str(length) for length in lengths) or "no curve"
        raise SpecError(
            f"the sequence has {shown} = {sum(lengths)} steps, but the run has {total}",
            hint="give lengths of at least 1 step whose sum is the steps of the run",
        )
    starts = [sum(lengths[:index]) for index in range(len(lengths))]

    def curve(step: int) -> float:
        index = max(bisect_right(starts, step) - 1, 0)
        return pieces[index][0](step - starts[index])

    return curve


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Multiplier that falls after `patience` consecutive evaluations without improvement.

    The object is immutable: `observe` returns a new one. With a patience of 10 the multiplier falls
    at the tenth evaluation without improvement; torch's ReduceLROnPlateau lowers the lr at the
    eleventh.

    Args:
        mode: "min" if a lower value is better, "max" if a higher one is.
        factor: Factor by which `multiplier` is multiplied at each reduction.
        patience: Number of consecutive evaluations without improvement after which the
            multiplier falls.
        least: Lower limit of `multiplier`.
        threshold: Least improvement, as a fraction of the best value so far. A non-finite value
            is not an improvement.
        best: Best value so far; None before the first finite one.
        num_bad: Number of consecutive evaluations without improvement so far.
        multiplier: Current multiplier of the learning rate.

    >>> plateau = Plateau(factor=0.5, patience=2)
    >>> for loss in (1.0, 0.9, 0.9, 0.9):
    ...     plateau = plateau.observe(loss)
    >>> plateau.multiplier, plateau.best
    (0.5, 0.9)
    """

    mode: Literal["min", "max"] = "min"
    factor: float = 0.5
    patience: int = 10
    least: float = 0.0
    threshold: float = 1e-4
    best: float | None = None
    num_bad: int = 0
    multiplier: float = 1.0

    def observe(self, value: float) -> Self:
        """Return the plateau after one more evaluation, whose score is `value`.

        `value` must be the same on all ranks.
        """
        if self._is_better(value):
            return replace(self, best=value, num_bad=0)
        if self.num_bad + 1 < self.patience:
            return replace(self, num_bad=self.num_bad + 1)
        return replace(
            self,
            num_bad=0,
            multiplier=max(self.multiplier * self.factor, min(self.least, self.multiplier)),
        )

    def _is_better(self, value: float) -> bool:
        if self.best is None or not math.isfinite(value):
            return math.isfinite(value)
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.threshold * abs(self.best)


def scale_to_batch(batch: int, reference: int, rule: BatchRule = "linear") -> float:
    """Return the factor that scales an lr tuned for a batch of `reference` to a batch of `batch`.

    The linear rule is for SGD: P. Goyal et al., "Accurate, Large Minibatch SGD", 2017. The square
    root is for Adam and its variants: S. Malladi et al., "On the SDEs and Scaling Rules for
    Adaptive Gradient Algorithms", 2022.

    Args:
        batch: Samples per step, of all ranks together.
        reference: Samples per step for which the learning rate was tuned.
        rule: "linear" for batch / reference, "sqrt" for the square root of that ratio.

    >>> scale_to_batch(1024, 256), scale_to_batch(1024, 256, "sqrt"), scale_to_batch(64, 256)
    (4.0, 2.0, 0.25)
    """
    ratio = batch / reference
    return ratio if rule == "linear" else math.sqrt(ratio)


def _share(step: int, length: int) -> float:
    """Return the completed fraction of `length` at `step`, from 0 to 1.

    For a length of 0 it is 0 at step 0, so that a warm-up rises to the start of a curve.
    """
    return 1.0 if step >= max(length, 1) else step / max(length, 1)


def _cosine_between(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


def _make_triangle(
    step: int, length: int, peak: float, levels: tuple[float, float, float], shape: Shape
) -> float:
    # in steps, not rounded, as torch has it: its first phase ends at pct_start * total_steps - 1
    rise = peak * length - 1
    first, top, last = levels
    if rise > 0 and step <= rise:
        start, end, share = first, top, step / rise
    else:
        start, end, share = top, last, min((step - rise) / (length - 1 - rise), 1.0)
    return (
        _cosine_between(start, end, share) if shape == "cosine" else start + (end - start) * share
    )
