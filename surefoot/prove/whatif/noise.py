"""Gradient noise at fixed weights: the variance of the gradient as a function of the batch size.

The result includes the batch size above which more samples add little.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.components import checkpoint
from surefoot.components.data.feed import to_device
from surefoot.components.data.order import Keys
from surefoot.components.data.sources.iterated import Iterated
from surefoot.components.stability.noise import GradientNoise, Noise
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import leaf_of
from surefoot.core.errors import InputError
from surefoot.train import environment
from surefoot.train.assemble import Assembly, assemble
from surefoot.train.quiet import preserve_state

GROUP = 8  # draws per estimate: the large batch is 8 small ones


@dataclass(frozen=True, kw_only=True)
class Level:
    """Variance of the gradient at one batch size, summed over all weights.

    `pairs` is the number of pairs of batches from which it is computed.
    """

    batch: int
    variance: float
    pairs: int


@dataclass(frozen=True, kw_only=True)
class GradientNoiseResult:
    """Results of the measurement of gradient noise.

    `slope` is that of log(variance) over log(batch), which is -1 if samples are independent.
    """

    batch: int
    levels: tuple[Level, ...]
    slope: float
    mean_norm: float
    noise: Noise | None

    def as_row(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "advice": None if self.noise is None else self.noise.advise(self.batch),
        }


class Pyramid:
    """Variance of the mean of 1, 2, 4, ... vectors, which are added one by one.

    The variance is half the mean square of the difference of two means.
    """

    def __init__(self) -> None:
        self.waiting: list[Tensor | None] = []
        self.squares: list[list[float]] = []

    def add(self, vector: Tensor) -> None:
        for level in range(len(self.waiting) + 1):
            if level == len(self.waiting):
                self.waiting.append(None)
                self.squares.append([])
            other = self.waiting[level]
            if other is None:
                self.waiting[level] = vector
                return
            self.squares[level].append(float((vector - other).square().sum()) / 2)
            self.waiting[level], vector = None, (vector + other) / 2

    def levels(self, size: int) -> tuple[Level, ...]:
        return tuple(
            Level(batch=size << level, variance=sum(found) / len(found), pairs=len(found))
            for level, found in enumerate(self.squares)
            if found
        )

    @property
    def mean(self) -> Tensor:
        """Mean of all vectors, if their number is a power of two."""
        top = self.waiting[-1]
        assert top is not None
        return top


def measure_noise(
    spec: RunSpec, *, run: Path | None = None, size: int | None = None, draws: int = 128
) -> GradientNoiseResult:
    """Draw batches with replacement at fixed weights, and compare their gradients.

    Args:
        spec: The spec.
        run: Run folder whose newest weights are used; None for the initial weights of `spec`.
        size: Smallest batch; None for an eighth of the spec's batch.
        draws: Number of batches, a power of two.

    Raises:
        InputError: For invalid numbers, and for data that cannot seek.
    """
    if draws < 2 * GROUP or draws & (draws - 1):
        raise InputError(f"--draws is {draws}", hint=f"a power of two, {2 * GROUP} or more")
    if size is not None and size < 1:
        raise InputError(f"--size is {size}", hint="1 or more samples")
    put_back = environment.apply(spec)
    try:
        assembly = assemble(spec)
        if isinstance(assembly.feed.source, Iterated) or assembly.feed.source.guarantee != "proven":
            raise InputError(
                f"batches cannot be drawn from it: {assembly.feed.source.describe()}",
                hint="use a source that seeks, as a map dataset",
            )
        if run is not None:
            checkpoint.load_into(assembly.model, run, checkpoint.find_step(run, "last"))
        return _measure(assembly, size or max(1, spec.train.batch // GROUP), draws)
    finally:
        put_back()


def _measure(assembly: Assembly, size: int, draws: int) -> GradientNoiseResult:
    pyramid, noise, drawn = (
        Pyramid(),
        GradientNoise(),
        np.random.default_rng(assembly.spec.train.seed),
    )
    squares, total = 0.0, torch.zeros(())
    for number in range(draws):
        vector = gradient_of(assembly, drawn.integers(0, assembly.feed.order.n, size), number)
        pyramid.add(vector)
        squares, total = squares + float(vector.square().sum()), total.to(vector) + vector
        if number % GROUP == GROUP - 1:
            noise.add(squares / GROUP, float((total / GROUP).square().sum()), size, size * GROUP)
            squares, total = 0.0, torch.zeros(())
    levels = pyramid.levels(size)
    return GradientNoiseResult(
        batch=assembly.spec.train.step_batch,
        levels=levels,
        slope=find_slope(levels),
        mean_norm=float(pyramid.mean.norm()),
        noise=noise.estimate(),
    )


def gradient_of(assembly: Assembly, ids: np.ndarray, draw: int = 0) -> Tensor:
    """Return the gradient of the mean loss over the samples `ids` as one vector.

    The weights do not change. `draw` seeds augmentation and dropout.
    """
    augment, model = assembly.task.augment, assembly.model
    batch = to_device(assembly.feed.source.read(ids), assembly.engine.device)
    if augment is not None:
        batch = augment(batch, Keys(assembly.spec.train.seed, draw, ids, assembly.engine.device))
    update = assembly.updates[0]
    params = [leaf_of(each) for each in update.guarded.parameters if each.requires_grad]
    with preserve_state(model, assembly.task.state, evaluates=False), torch.enable_grad():
        torch.manual_seed(draw)
        with assembly.engine.policy.context():
            loss = update.loss(model, batch)
        factors = [
            term.weight / float(term.count) if float(term.count) else 0.0 for term in loss.terms
        ]
        total = torch.stack(
            [term.total * factor for term, factor in zip(loss.terms, factors, strict=True)]
        ).sum()
        # without items of any term that depends on the model, the loss is a constant
        parts = (
            torch.autograd.grad(total, params, allow_unused=True)
            if total.requires_grad
            else [None] * len(params)
        )
    return torch.cat(
        [
            (torch.zeros_like(p) if part is None else part).flatten().float()
            for p, part in zip(params, parts, strict=True)
        ]
    )


def find_slope(levels: tuple[Level, ...]) -> float:
    """Return the slope of log(variance) over log(batch), weighted by the pairs of each level.

    Returns NaN if a variance is 0 or there are fewer than two levels.
    """
    if min((level.variance for level in levels), default=0.0) <= 0 or len(levels) < 2:
        return math.nan
    x, y = (np.log([getattr(level, name) for level in levels]) for name in ("batch", "variance"))
    weights = np.array([level.pairs for level in levels], dtype=float)
    x, y = x - np.average(x, weights=weights), y - np.average(y, weights=weights)
    return float((weights * x * y).sum() / (weights * x * x).sum())
