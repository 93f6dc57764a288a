"""Every curve is its formula, equals torch's scheduler where there is one, and has no memory."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

from surefoot.core.errors import SpecError
from surefoot.core.schedule import curves as schedules
from surefoot.core.schedule.curves import Multiplier, Plateau

BASE = 0.1
STEPS = 120
CLOSE = 1e-12

CURVES: dict[str, Multiplier] = {
    "constant": schedules.constant,
    "linear": partial(schedules.linear, length=100, start=0.3, floor=0.05),
    "cosine": partial(schedules.cosine, length=100, floor=0.01),
    "cosine_restarts": partial(schedules.cosine_restarts, first=10, factor=2, floor=0.01),
    "cosine_restarts, equal": partial(schedules.cosine_restarts, first=7),
    "step_decay": partial(schedules.step_decay, every=30),
    "multi_step": partial(schedules.multi_step, milestones=(30, 80), factor=0.2),
    "exponential": partial(schedules.exponential, factor=0.95),
    "polynomial": partial(schedules.polynomial, length=100, power=2.0),
    "polynomial, floor": partial(schedules.polynomial, length=100, power=0.5, floor=0.1),
    "inverse_square_root": partial(schedules.inverse_square_root, timescale=16),
    "warmup, linear": partial(schedules.warmup, length=50),
    "warmup, cosine": partial(schedules.warmup, length=50, shape="cosine"),
    "warmup, exponential": partial(schedules.warmup, length=50, shape="exponential", start=0.001),
    "warmup_stable_decay": partial(
        schedules.warmup_stable_decay, warmup_length=10, stable=60, decay=40, floor=0.1
    ),
    "warmup_stable_decay, sqrt": partial(
        schedules.warmup_stable_decay, warmup_length=0, stable=60, decay=40, shape="sqrt"
    ),
    "one_cycle": partial(schedules.one_cycle, length=120),
    "one_cycle, linear": partial(
        schedules.one_cycle, length=120, peak=0.45, start=0.1, final=0.001, shape="linear"
    ),
}

Torch = Callable[[torch.optim.Optimizer], Any]
TORCH: dict[str, tuple[Torch, int]] = {
    "linear": (
        lambda o: torch_schedules.LinearLR(o, start_factor=0.3, end_factor=0.05, total_iters=100),
        STEPS,
    ),
    # later it rises again
    "cosine": (lambda o: torch_schedules.CosineAnnealingLR(o, T_max=100, eta_min=0.01 * BASE), 101),
    "cosine_restarts": (
        lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 10, 2, eta_min=0.01 * BASE),
        STEPS,
    ),
    "cosine_restarts, equal": (lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 7), STEPS),
    "step_decay": (lambda o: torch_schedules.StepLR(o, 30, gamma=0.1), STEPS),
    "multi_step": (lambda o: torch_schedules.MultiStepLR(o, [30, 80], gamma=0.2), STEPS),
    "exponential": (lambda o: torch_schedules.ExponentialLR(o, 0.95), STEPS),
    "polynomial": (lambda o: torch_schedules.PolynomialLR(o, total_iters=100, power=2.0), STEPS),
    "warmup, linear": (
        lambda o: torch_schedules.LinearLR(o, start_factor=1 / 50, total_iters=49),
        STEPS,
    ),
    "inverse_square_root": (
        lambda o: torch_schedules.LambdaLR(o, lambda t: (16 / (16 + t)) ** 0.5),
        STEPS,
    ),
    "one_cycle": (lambda o: torch_schedules.OneCycleLR(o, BASE, total_steps=120), STEPS),
    "one_cycle, linear": (
        lambda o: torch_schedules.OneCycleLR(
            o,
            BASE,
            total_steps=120,
            pct_start=0.45,
            div_factor=10,
            final_div_factor=100,
            anneal_strategy="linear",
        ),
        STEPS,
    ),
}


def rates_of_torch(make: Torch, steps: int) -> tuple[list[float], list[float]]:
    """What torch's scheduler sets for each update: rate and momentum."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(optimizer)
        rates, momenta = [], []
        for step in range(steps):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            momenta.append(float(optimizer.param_groups[0]["momentum"]))
            optimizer.step()
            if step + 1 < steps:
                scheduler.step()
    return rates, momenta


@pytest.mark.parametrize("name", TORCH)
def test_a_curve_equals_torch_s_scheduler_to_1e_12(name: str) -> None:
    make, steps = TORCH[name]
    expected, _ = rates_of_torch(make, steps)
    assert [BASE * CURVES[name](step) for step in range(steps)] == pytest.approx(
        expected, rel=0, abs=CLOSE
    )


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize(
    ("total", "peak"), [(2, 0.3), (3, 0.5), (10, 0.3), (17, 0.9), (120, 0.25), (5000, 0.01)]
)
def test_one_cycle_and_its_momentum_equal_torch_s_at_every_length(
    total: int, peak: float, shape: Any
) -> None:
    strategy = {"cosine": "cos", "linear": "linear"}[shape]
    rates, momenta = rates_of_torch(
        lambda o: torch_schedules.OneCycleLR(
            o, BASE, total_steps=total, pct_start=peak, anneal_strategy=strategy
        ),
        total,
    )
    ours = [BASE * schedules.one_cycle(step, total, peak, shape=shape) for step in range(total)]
    assert ours == pytest.approx(rates, rel=0, abs=CLOSE)
    ours = [schedules.one_cycle_momentum(step, total, peak, shape=shape) for step in range(total)]
    assert ours == pytest.approx(momenta, rel=0, abs=CLOSE)


def test_one_cycle_goes_from_low_to_high_to_near_zero_and_momentum_against_it() -> None:
    rates = [schedules.one_cycle(step, 1000) for step in range(1000)]
    momenta = [schedules.one_cycle_momentum(step, 1000) for step in range(1000)]
    top = rates.index(max(rates))
    assert top == 299
    assert (rates[0], rates[top], rates[-1]) == pytest.approx((0.04, 1.0, 4e-6))
    assert (momenta[0], momenta[top], momenta[-1]) == pytest.approx((0.95, 0.85, 0.95))
    assert all((rates[i + 1] - rates[i]) * (momenta[i + 1] - momenta[i]) < 0 for i in range(999))
    assert schedules.one_cycle(5000, 1000) == rates[-1]
    assert schedules.one_cycle(0, 1) == pytest.approx(4e-6)


FORMULAS: dict[str, Callable[[int], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 0.3 + (0.05 - 0.3) * t / 100,
    "cosine": lambda t: 0.01 + 0.99 / 2 * (1 + math.cos(math.pi * t / 100)),
    "step_decay": lambda t: 0.1 ** math.floor(t / 30),
    "multi_step": lambda t: 0.2 ** ((t >= 30) + (t >= 80)),
    "exponential": lambda t: 0.95**t,
    "polynomial": lambda t: (1 - t / 100) ** 2,
    "polynomial, floor": lambda t: 0.1 + 0.9 * math.sqrt(1 - t / 100),
    "inverse_square_root": lambda t: 4 / math.sqrt(16 + t),
    "warmup, linear": lambda t: min((t + 1) / 50, 1),
    "warmup, cosine": lambda t: (1 - math.cos(math.pi * min(t + 1, 50) / 50)) / 2,
    "warmup, exponential": lambda t: 0.001 ** (1 - min(t + 1, 50) / 50),
    "warmup_stable_decay": lambda t: min((t + 1) / 10, 1, 1 - 0.9 * (t - 70) / 40),
    "warmup_stable_decay, sqrt": lambda t: 1 - math.sqrt(max(t - 60, 0) / 40),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_curve_is_the_formula_of_its_docstring(name: str) -> None:
    for step in range(100):
        assert CURVES[name](step) == pytest.approx(FORMULAS[name](step), rel=0, abs=CLOSE)


@pytest.mark.parametrize("name", CURVES)
def test_a_restart_from_any_position_has_the_same_tail(name: str) -> None:
    whole = [CURVES[name](step) for step in range(STEPS)]
    again = pickle.loads(pickle.dumps(CURVES[name]))
    for start in (119, 61, 60, 30, 1, 0):
        assert [again(step) for step in range(start, STEPS)] == whole[start:]


@pytest.mark.parametrize("name", CURVES)
def test_no_curve_leaves_the_range_from_0_to_1(name: str) -> None:
    assert all(0 <= CURVES[name](step) <= 1 for step in range(500))


def test_step_decay_holds_its_rate_for_whole_blocks() -> None:
    rates = [0.1 * schedules.step_decay(epoch, 30) for epoch in range(90)]
    assert rates == pytest.approx([0.1] * 30 + [0.01] * 30 + [0.001] * 30, rel=1e-14)


def test_cosine_stays_at_its_floor_where_the_bare_formula_rises_again() -> None:
    assert schedules.cosine(0, 50, floor=1e-6) == 1.0
    assert {schedules.cosine(step, 50, floor=1e-6) for step in range(50, 200)} == {1e-6}


def test_warm_restarts_fall_on_10_30_and_70() -> None:
    curve = CURVES["cosine_restarts"]
    assert [step for step in range(STEPS) if curve(step) == 1.0] == [0, 10, 30, 70]
    assert curve(69) < 0.02


def test_warm_up_counts_from_one_so_no_update_is_wasted_and_its_length_reaches_the_peak() -> None:
    for shape in ("linear", "cosine", "exponential"):
        rates = [schedules.warmup(step, 5, shape) for step in range(7)]
        assert rates[0] > 0
        assert rates[:5] == sorted(rates[:5])
        assert rates[4:] == [1.0, 1.0, 1.0]
        assert schedules.warmup(0, 0, shape) == 1.0


def test_warm_up_plus_cosine_has_its_peak_half_and_floor_at_10_55_and_100_epochs() -> None:
    per_epoch, floor = 13, 0.02
    pieces = [
        (partial(schedules.warmup, length=130), 130),
        (partial(schedules.cosine, length=1170, floor=floor), 1170),
    ]
    curve = schedules.sequence(pieces, total=100 * per_epoch)
    assert curve(10 * per_epoch - 1) == curve(10 * per_epoch) == 1.0  # continuous at the join
    assert curve(55 * per_epoch) == pytest.approx((1 + floor) / 2)
    assert curve(100 * per_epoch) == floor
    jumps = [abs(curve(step + 1) - curve(step)) for step in range(100 * per_epoch)]
    assert max(jumps) <= 1 / 130 + CLOSE


def test_a_sequence_equals_torch_s_sequential_scheduler_and_joins_where_it_says() -> None:
    def make(optimizer: torch.optim.Optimizer) -> torch_schedules.SequentialLR:
        parts = [
            torch_schedules.LinearLR(optimizer, start_factor=1 / 20, total_iters=19),
            torch_schedules.ConstantLR(optimizer, factor=1.0),
            torch_schedules.CosineAnnealingLR(optimizer, T_max=70, eta_min=0.1 * BASE),
        ]
        return torch_schedules.SequentialLR(optimizer, parts, milestones=[20, 50])

    cosine = partial(schedules.cosine, length=70, floor=0.1)
    curve = schedules.sequence(
        [(partial(schedules.warmup, length=20), 20), (schedules.constant, 30), (cosine, 70)],
        total=120,
    )
    expected, _ = rates_of_torch(make, STEPS)
    # torch's chained form multiplies step by step, so its own rounding grows with the length
    assert [BASE * curve(step) for step in range(STEPS)] == pytest.approx(
        expected, rel=0, abs=CLOSE
    )
    assert [curve(step) for step in (18, 19, 20, 49, 50, 120, 500)] == pytest.approx(
        [0.95, 1, 1, 1, 1, 0.1, 0.1]
    )


@pytest.mark.parametrize("lengths", [(50, 49), (50, 51), (0, 100), (100, 0), (-10, 110), ()])
def test_a_sequence_that_does_not_add_up_to_the_run_is_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="the run has 100"):
        schedules.sequence([(schedules.constant, length) for length in lengths], total=100)


def watch(plateau: Plateau, values: list[float]) -> list[float]:
    multipliers = []
    for value in values:
        plateau = plateau.observe(value)
        multipliers.append(plateau.multiplier)
    return multipliers


LOSSES = [3.0, 2.0, 2.1, 1.9999, 2.2, 2.3, 1.5, 1.6, 1.7, 1.5, 1.8, 1.4999, 1.7, 1.9]
LOSSES += [1.2, *[1.1] * 7]


@pytest.mark.parametrize("patience", [1, 2, 3, 10])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_lowers_at_the_stated_bad_check_and_torch_one_later(
    mode: Any, patience: int
) -> None:
    values = LOSSES if mode == "min" else [4 - value for value in LOSSES]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = torch_schedules.ReduceLROnPlateau(
        optimizer, mode=mode, factor=0.5, patience=patience - 1, min_lr=0.2 * BASE
    )
    expected = []
    for value in values:
        scheduler.step(value)
        expected.append(optimizer.param_groups[0]["lr"] / BASE)
    ours = watch(Plateau(mode=mode, factor=0.5, patience=patience, least=0.2), values)
    assert ours == pytest.approx(expected, rel=0, abs=CLOSE)


def test_a_plateau_halves_at_the_tenth_bad_check_and_never_below_the_least() -> None:
    multipliers = watch(Plateau(factor=0.5, patience=10, least=0.2), [1.0] * 41)
    assert [multipliers.index(level) for level in (0.5, 0.25, 0.2)] == [10, 20, 30]
    assert multipliers[-1] == 0.2


def test_a_plateau_is_a_value_that_goes_on_where_it_was() -> None:
    plateau = Plateau(patience=2)
    for value in LOSSES[:9]:
        plateau = plateau.observe(value)
    again = pickle.loads(pickle.dumps(plateau))
    assert (
        watch(again, LOSSES[9:])
        == watch(plateau, LOSSES[9:])
        == watch(Plateau(patience=2), LOSSES)[9:]
    )


def test_a_plateau_takes_what_is_not_finite_for_no_progress() -> None:
    assert watch(Plateau(patience=2), [math.nan, math.inf, 1.0, math.nan, 0.5, -math.inf]) == [
        1.0,
        0.5,
        0.5,
        0.5,
        0.5,
        0.5,
    ]
