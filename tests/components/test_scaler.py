"""The loss scaler, ours and the one of the example, against torch.amp.GradScaler.

Also what a device may compute in.
"""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.optim.update import GuardedUpdate
from surefoot.components.precision.policy import (
    FormatSupport,
    choose,
    compute_context,
    set_products,
)
from surefoot.components.precision.scaler import LossScaler
from surefoot.core.errors import InputError, SpecError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "loss_scaler.py"
CLIP = 0.05


def script(seed: int, length: int = 40) -> list[bool]:
    """Which steps overflow: in runs, alone, at the start and just before the scale would double."""
    draws = random.Random(seed)
    return [draws.random() < 0.3 for _ in range(length)]


SCRIPTS = [script(seed) for seed in range(6)] + [
    [True] * 5 + [False] * 9,
    [False] * 12,
    [False, False, True] * 6,
]
Told = list[tuple[float, bool]]


def batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step)), torch.arange(8) % 3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def spoil(model: nn.Module, overflows: bool) -> None:
    if overflows:
        next(model.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]


def by_torch(overflows: list[bool], *, clips_first: bool = False) -> tuple[list[Tensor], Told]:
    model, optimizer = build()
    scaler, told = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3), []
    for step, does in enumerate(overflows):
        optimizer.zero_grad()
        x, y = batch(step)
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        spoil(model, does)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if not clips_first:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        told.append((scaler.get_scale(), moved))
    return [parameter.detach() for parameter in model.parameters()], told


def by_us(overflows: list[bool], *, on_device: bool) -> tuple[list[Tensor], Told]:
    model, optimizer = build()
    update = GuardedUpdate([optimizer], clip=CLIP, total_steps=len(overflows), on_device=on_device)
    assert update.on_device is on_device
    scaler = LossScaler(growth_interval=3, device=torch.device("cpu") if on_device else None)
    told: list[tuple[Any, Any]] = []
    for step, does in enumerate(overflows):
        update.clear_gradients()
        x, y = batch(step)
        total = F.cross_entropy(model(x), y, reduction="sum")
        total.backward(scaler.seed(torch.ones(())))  # type: ignore[no-untyped-call]
        spoil(model, does)
        _, applied = update.step_if_finite(1 / 8 / scaler.scale)
        scaler.update(~applied if isinstance(applied, Tensor) else not applied)
        told.append((scaler.scale, applied))  # read after the loop: each step keeps its own
    return [p.detach() for p in model.parameters()], [
        (float(scale), bool(applied)) for scale, applied in told
    ]


def by_the_example(overflows: list[bool]) -> tuple[list[Tensor], Told]:
    model, optimizer = build()
    scaler, told = runpy.run_path(str(EXAMPLE))["Scaler"](growth_interval=3), []
    for step, does in enumerate(overflows):
        optimizer.zero_grad()
        x, y = batch(step)
        scaler.scaled(F.cross_entropy(model(x), y)).backward()
        spoil(model, does)
        applied = scaler.step(optimizer, clip=CLIP)
        told.append((scaler.scale, applied))
    return [parameter.detach() for parameter in model.parameters()], told


WAYS = {
    "ours": lambda overflows: by_us(overflows, on_device=False),
    "ours on a device": lambda overflows: by_us(overflows, on_device=True),
    "the example": by_the_example,
}


@pytest.mark.parametrize("overflows", SCRIPTS)
@pytest.mark.parametrize("way", WAYS)
def test_scale_skipped_steps_and_weights_are_those_of_torchs_scaler(
    way: str, overflows: list[bool]
) -> None:
    weights, told = WAYS[way](overflows)
    expected, expected_told = by_torch(overflows)
    assert told == expected_told
    assert [applied for _, applied in told] == [not does for does in overflows]
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)


def test_clipping_before_dividing_would_clip_too_hard_and_is_not_what_is_done() -> None:
    """With SGD the update is the gradient: S = 65,536 times too small if it was clipped first."""
    moves = {}
    for name, scale in (("ours", 2.0**16), ("no scale", 1.0)):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(3))
        update = GuardedUpdate([torch.optim.SGD([weight], lr=1.0, fused=True)], clip=1.0)
        (weight * torch.tensor([30.0, 40.0, 0.0])).sum().backward(torch.tensor(scale))  # type: ignore[no-untyped-call]
        norm, _ = update.step_if_finite(1 / scale)
        moves[name] = (1.0 - weight.detach(), norm)
    torch.testing.assert_close(moves["ours"][0], torch.tensor([0.6, 0.8, 0.0]))
    # the norm that is told is that of the true gradient
    assert moves["ours"][1] == moves["no scale"][1] == 50.0
    weight = nn.Parameter(torch.ones(3))
    (weight * torch.tensor([30.0, 40.0, 0.0])).sum().mul(2.0**16).backward()
    nn.utils.clip_grad_norm_([weight], 1.0)
    assert weight.grad is not None
    assert float(weight.grad.div(2.0**16).norm()) == pytest.approx(2.0**-16)


def test_a_state_that_was_saved_goes_on_with_the_same_scales() -> None:
    for device in (None, torch.device("cpu")):
        whole, left = (
            LossScaler(growth_interval=4, device=device),
            LossScaler(growth_interval=4, device=device),
        )
        told = []
        for step, does in enumerate(script(3)):
            if step == 17:
                left, kept = LossScaler(growth_interval=4, device=device), left.state_dict()
                left.load_state_dict(kept)
            for each in (whole, left):
                each.update(torch.tensor(does) if device else does)
            told.append((whole.state_dict(), left.state_dict()))
        assert all(one == other for one, other in told)
        assert len({one["scale"] for one, _ in told}) > 3


def test_a_scale_stays_in_the_range_of_fp32_and_is_a_power_of_two() -> None:
    for device in (None, torch.device("cpu")):
        scaler = LossScaler(2.0**126, growth_interval=1, device=device)
        for _ in range(3):
            scaler.update(torch.tensor(False) if device else False)
        assert float(scaler.scale) == 2.0**127
    with pytest.raises(InputError, match="is not a power of two"):
        LossScaler(1000.0)


OLD, NEW = (
    FormatSupport("cuda", "Tesla V100", frozenset({"fp16"})),
    FormatSupport("cuda", "NVIDIA H100", frozenset({"fp16", "bf16", "tf32"})),
)
OLDEST, PLAIN, WITH_BF16 = (
    FormatSupport("cuda", "GTX 980", frozenset()),
    FormatSupport("cpu", "old", frozenset()),
    FormatSupport("cpu", "new", frozenset({"bf16"})),
)


@pytest.mark.parametrize(
    ("units", "best"),
    [(OLD, "fp16"), (NEW, "bf16"), (OLDEST, "fp32"), (PLAIN, "fp32"), (WITH_BF16, "bf16")],
)
def test_auto_takes_the_best_that_a_device_has_units_for_and_says_why(
    units: FormatSupport, best: str
) -> None:
    chosen, why = choose("auto", units)
    assert chosen == best
    assert units.name in why


@pytest.mark.parametrize(
    ("wanted", "units", "reason"),
    [
        ("bf16", OLD, "no units for bf16"),
        ("tf32", OLD, "no units for tf32"),
        ("fp16", OLDEST, "no units for fp16"),
        ("tf32", WITH_BF16, "a GPU's tensor cores"),
    ],
)
def test_what_a_device_lacks_is_refused_with_the_reason(
    wanted: str, units: FormatSupport, reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        choose(wanted, units)


def test_a_cpu_computes_16_bits_in_software_and_says_that_it_is_no_faster() -> None:
    assert choose("bf16", PLAIN)[0] == "bf16"
    assert "will not be faster" in choose("bf16", PLAIN)[1]


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_softmax_norms_sums_and_losses_stay_fp32_on_a_cpu_and_products_do_not(compute: Any) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(8, 8)
    with compute_context(compute, torch.device("cpu"))():
        half = x @ weight
        assert half.dtype in (torch.bfloat16, torch.float16)
        made = {
            "softmax": F.softmax(half, -1),
            "log_softmax": F.log_softmax(half, dim=-1),
            "layer norm": nn.LayerNorm(8)(half),
            "group norm": F.group_norm(half, 2),
            "rms norm": F.rms_norm(half, (8,)),
            "sum": half.sum(),
            "rows": half.sum(1),
            "sum of squares": (half**2).sum(),
            "norm": torch.linalg.vector_norm(half),
            "cumsum": half.cumsum(1),
            "cross entropy": F.cross_entropy(half, torch.arange(4)),
            "mse": F.mse_loss(half, half.detach() + 1),
        }
    assert {
        name: tensor.dtype for name, tensor in made.items() if tensor.dtype != torch.float32
    } == {}
    sum(tensor.sum() for tensor in made.values()).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    assert F.softmax(half.detach(), -1).dtype == half.dtype  # outside of autocast all is as it was


SWITCHED: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "set_float32_matmul_precision high": lambda: torch.set_float32_matmul_precision("high"),
    "set_float32_matmul_precision medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cudnn without tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "products in tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
}


def older_switches() -> list[Any]:
    return [
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
        torch.get_float32_matmul_precision(),
    ]


@pytest.fixture
def switches_kept() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    cast(Any, torch.backends.cuda.matmul).fp32_precision = "none"


@pytest.mark.usefixtures("switches_kept")
@pytest.mark.parametrize("compute", ["fp32", "tf32"])
@pytest.mark.parametrize("name", SWITCHED)
def test_the_older_switches_of_products_agree_with_the_newer_ones(name: str, compute: str) -> None:
    """A loss that enters torch.backends.cudnn.flags(), as CTC of transformers does, reads them."""
    SWITCHED[name]()
    before = older_switches()
    put_back = set_products(compute)
    inside = older_switches()
    assert inside[:2] == [compute == "tf32"] * 2
    with torch.backends.cudnn.flags(enabled=False):
        assert not torch.backends.cudnn.enabled
    assert older_switches() == inside
    put_back()
    assert older_switches() == before


def test_products_are_put_back_as_they_were() -> None:
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    put_back = set_products("tf32")
    assert matmul.fp32_precision == "tf32"
    put_back()
    assert matmul.fp32_precision == before


def test_a_shorter_interval_holds_for_the_steps_that_lie_behind() -> None:
    scaler = LossScaler(1024.0, growth_interval=2000)
    for _ in range(50):
        scaler.update(False)
    forked = LossScaler(1024.0, growth_interval=10)
    forked.load_state_dict(scaler.state_dict())
    forked.update(False)
    assert forked.state_dict() == {"scale": 2048.0, "clean_steps": 0}


@pytest.mark.parametrize(
    ("name", "words"),
    [("fp8", "none of fp32, tf32"), ("auto", "none of fp32, tf32"), (None, "None is none of")],
)
def test_a_context_for_a_precision_that_is_none_is_refused(name: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        compute_context(name, torch.device("cpu"))
