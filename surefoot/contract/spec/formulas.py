"""The formulas of a run as Python statements, with which a plain PyTorch loop can be compared.

Names are keys of the spec, and the following. `w` is a weight, `g` its gradient, and `gradients`
those of all weights. `t` is the number of this update from 1, and `n` the number of updates before
it. `step` is the number of updates since the end of the warm-up, and 0 during it. `length` is the
number of steps that the curve covers. `m`, `s` and `v` start at 0, `average` at the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from surefoot.contract.spec.run_spec import RunSpec

_MOMENTS = "m = betas[0] * m + (1 - betas[0]) * g; s = betas[1] * s + (1 - betas[1]) * g * g; "
_STEP = "m / (1 - betas[0] ** t) / (sqrt(s / (1 - betas[1] ** t)) + eps)"
_ADAMW = f"w = w - lr * weight_decay * w; {_MOMENTS}w = w - lr * {_STEP}"
UPDATES: Mapping[str, str] = {
    "sgd": "g = g + weight_decay * w; v = momentum * v + g; w = w - lr * v",
    "sgd, nesterov": (
        "g = g + weight_decay * w; v = momentum * v + g; w = w - lr * (g + momentum * v)"
    ),
    "adam": f"g = g + weight_decay * w; {_MOMENTS}w = w - lr * {_STEP}",
    "adamw": _ADAMW,
    "muon": (
        f"of embeddings, the head, norms and biases, of others as torch.optim.Muon does: {_ADAMW}"
    ),
    "lars": (
        "r = trust_coefficient * norm(w) / (norm(g) + weight_decay * norm(w)); "
        "v = momentum * v + lr * r * (g + weight_decay * w); w = w - v"
    ),
    "lamb": f"{_MOMENTS}u = {_STEP} + weight_decay * w; w = w - lr * norm(w) / norm(u) * u",
}
CURVES: Mapping[str, str] = {
    "constant": "lr = lr * factor",
    "linear": "lr = lr * (start_factor + (floor - start_factor) * step / length)",
    "cosine": "lr = lr * (floor + (1 - floor) / 2 * (1 + cos(pi * step / length)))",
    "step": "lr = lr * factor ** (step // every)",
    "exponential": "lr = lr * factor ** (step / every)",
    "polynomial": "lr = lr * (floor + (1 - floor) * (1 - step / length) ** power)",
    "inverse_square_root": "lr = lr * sqrt(timescale / (timescale + step))",
}
WARMUP = "lr = lr * min(1, t / warmup)"


@dataclass(frozen=True)
class Formula:
    """Formula as Python statements, and the spec key that selects it.

    `holds` returns whether the formula applies to a spec.
    """

    key: str
    applies: str  # the value of the key that selects it
    text: str
    holds: Callable[[RunSpec], bool]


def _make_update_check(name: str) -> Callable[[RunSpec], bool]:
    return lambda spec: (
        name
        == (
            f"{spec.optim.name}, nesterov"
            if spec.optim.name == "sgd" and spec.optim.nesterov
            else spec.optim.name
        )
    )


def _make_curve_check(name: str) -> Callable[[RunSpec], bool]:
    return lambda spec: spec.schedule.name == name and not spec.schedule.sequence


def _has_warmup(spec: RunSpec) -> bool:
    schedule = spec.schedule
    return (
        not schedule.sequence
        and not schedule.warmup.startswith("0 ")
        and schedule.warmup_shape == "linear"
    )


def _make_scaling_check(rule: str) -> Callable[[RunSpec], bool]:
    return lambda spec: spec.optim.reference_batch is not None and spec.optim.scaling == rule


def _make_average_check(ramp: bool) -> Callable[[RunSpec], bool]:
    return lambda spec: spec.optim.ema is not None and spec.optim.ema_ramp is ramp


FORMULAS: tuple[Formula, ...] = (
    *(
        Formula("schedule.name", name, text, _make_curve_check(name))
        for name, text in CURVES.items()
    ),
    Formula("schedule.warmup", "linear", WARMUP, _has_warmup),
    Formula(
        "optim.reference_batch",
        "linear",
        "lr = lr * batch * accumulate / reference_batch",
        _make_scaling_check("linear"),
    ),
    Formula(
        "optim.reference_batch",
        "sqrt",
        "lr = lr * sqrt(batch * accumulate / reference_batch)",
        _make_scaling_check("sqrt"),
    ),
    Formula(
        "optim.clip",
        "above 0",
        "g = g * min(1, clip / (norm(gradients) + 1e-6))",
        lambda spec: spec.optim.clip > 0,
    ),
    Formula(
        "optim.clip_value",
        "a number",
        "g = max(-clip_value, min(clip_value, g))",
        lambda spec: spec.optim.clip_value is not None,
    ),
    *(
        Formula("optim.name", name, text, _make_update_check(name))
        for name, text in UPDATES.items()
    ),
    Formula(
        "optim.ema",
        "a number",
        "d = min(ema, (1 + n) / (10 + n)); average = d * average + (1 - d) * w",
        _make_average_check(ramp=True),
    ),
    Formula(
        "optim.ema",
        "a number, ema_ramp = false",
        "d = ema; average = d * average + (1 - d) * w",
        _make_average_check(ramp=False),
    ),
)


def find(spec: RunSpec) -> list[Formula]:
    """Return the formulas that apply to a spec, in the order in which a step uses them.

    If the task of a run defines its own optimizer or schedule, the run does not use the formulas of
    the spec for it.
    """
    return [each for each in FORMULAS if each.holds(spec)]
