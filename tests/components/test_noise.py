"""The gradient noise scale: against numbers that are known, with an interval that holds them."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.components.stability.noise import GradientNoise, Noise


def measured(
    seed: int, *, scale: float, part: int = 8, whole: int = 64, steps: int = 200, weights: int = 400
) -> Noise | None:
    """Gradients of norm 1 with noise of variance `scale` a sample, over parts of a step and all."""
    generator = np.random.default_rng(seed)
    truth = np.ones(weights) / np.sqrt(weights)
    noise = GradientNoise()
    for _ in range(steps):
        parts = truth + generator.normal(
            0, np.sqrt(scale / weights / part), (whole // part, weights)
        )
        noise.add(float((parts[0] ** 2).sum()), float((parts.mean(0) ** 2).sum()), part, whole)
    return noise.estimate()


@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_the_interval_holds_the_true_scale_in_about_nineteen_of_twenty_runs(scale: float) -> None:
    found = [measured(seed, scale=scale) for seed in range(40)]
    held = sum(
        each is not None and each.high is not None and each.low <= scale <= each.high
        for each in found
    )
    assert held >= 35
    assert all(
        each is not None and each.scale is not None and each.scale == pytest.approx(scale, rel=0.5)
        for each in found
    )


def test_gradients_that_are_0_have_no_scale() -> None:
    noise = GradientNoise()
    for _ in range(20):
        noise.add(0.0, 0.0, 8, 64)
    assert noise.estimate() is None


def test_pure_noise_has_a_scale_without_an_upper_end() -> None:
    noise, generator = GradientNoise(), np.random.default_rng(0)
    for _ in range(50):
        parts = generator.normal(0, 1, (8, 100))
        noise.add(float((parts[0] ** 2).sum()), float((parts.mean(0) ** 2).sum()), 8, 64)
    found = noise.estimate()
    assert found is not None
    assert found.high is None
    assert "or more" in found.advise(64)


def test_what_is_not_finite_or_too_few_says_nothing() -> None:
    noise = GradientNoise()
    for value in (float("nan"), float("inf")):
        for _ in range(20):
            noise.add(value, 1.0, 8, 64)
    noise.add(2.0, 1.0, 64, 64)
    for _ in range(7):
        noise.add(2.0, 1.0, 8, 64)
    assert noise.estimate() is None
    noise.add(2.0, 1.0, 8, 64)
    found = noise.estimate()
    assert found is not None
    # |G|^2 = (64 - 16) / 56, S = 1 / (1/8 - 1/64): their ratio is 64 * 8 / 48
    assert (found.scale, found.low, found.high) == pytest.approx((64 * 8 / 48,) * 3)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (10, "a larger batch, up to about 100"),
        (100, "would save few steps"),
        (1000, "a smaller batch"),
    ],
)
def test_the_advice_follows_from_where_the_batch_lies(batch: int, says: str) -> None:
    text = Noise(scale=100.0, low=80.0, high=120.0, num_steps=50).advise(batch)
    assert says in text
    assert (
        f"{1 + 100 / batch:.3g}x the minimum of steps and "
        f"{1 + batch / 100:.3g}x the minimum of samples" in text
    )
