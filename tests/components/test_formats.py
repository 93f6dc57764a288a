"""Tests of formats found by running them, and of what goes wrong in few bits.

It is detected, named by module, and cured by what the message says.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.optim.masters import publish, store_narrow
from surefoot.components.optim.update import GuardedUpdate
from surefoot.components.precision.formats import find_formats, round_to_tf32
from surefoot.components.precision.instability import (
    Watch,
    advise_scale,
    count_lost,
    total,
    was_clipped_first,
)
from surefoot.components.precision.keep import keep_in_fp32
from surefoot.components.precision.policy import compute_context
from surefoot.components.precision.scaler import LossScaler
from surefoot.contract.state import master_of
from surefoot.core.errors import NumbersError
from surefoot.train.failure.blame import find_overflow
from surefoot.train.run import Run
from tests.train.small import Small, call, spec, write_task

CPU = torch.device("cpu")
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_found_by_running_a_format_is_what_torch_says_of_it(name: str) -> None:
    found = {each.name: each for each in find_formats()}[name]
    info = torch.finfo(DTYPES[name])
    assert (found.bits, found.largest, found.least_normal) == (info.bits, info.max, info.tiny)
    assert (found.least, found.resolution) == (info.tiny * info.eps, info.eps)
    assert found.significant_bits == 1 - math.log2(info.eps)


def test_the_borders_of_fp16_and_tf32_are_where_they_are() -> None:
    found = {each.name: each for each in find_formats()}
    half, tf32 = found["fp16"], found["tf32"]
    assert (half.largest, half.overflows_from, half.overflows_to, half.vanishes_up_to) == (
        65504.0,
        65520.0,
        "inf",
        2.0**-25,
    )
    assert (tf32.significant_bits, tf32.resolution, tf32.least_normal) == (
        11,
        2.0**-10,
        torch.finfo(torch.float32).tiny,
    )
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    by_half = values.half().float()  # fp16 has as many bits, and its range is enough here
    assert torch.equal(round_to_tf32(values), by_half)


def test_the_verb_prints_them_and_counts_what_fp16_makes_zero_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "formats") == 0
    assert "65520" in capsys.readouterr().out
    use = write_task(
        tmp_path, change=("# LOSS", "output = output * 1e-8 if output.requires_grad else output")
    )
    assert call(monkeypatch, "formats", use, "--set", "train.batch=4", "--json") == 0
    row = json.loads(capsys.readouterr().out)["fp16"]
    assert row["shares"]["1"] > 0.5
    assert row["shares"]["65536"] < 0.1
    assert row["advised_scale"] > 65536
    assert call(monkeypatch, "formats", "--seed", "1") == 2


class Rms(nn.Module):
    """A norm that squares in the dtype that it is given.

    Values above 255 overflow in fp16, though the result would not.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x / (x * x).mean(-1, keepdim=True).sqrt()


class Large(Small):
    """Its norm is given numbers above 255."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Rms(), nn.Linear(8, 3))
        with torch.no_grad():
            model[0].weight.mul_(2000.0)
        return model


class Summing(Large):
    """A sum of squares that is part of what is learned."""

    def model(self) -> nn.Module:
        class Squares(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.cat([x, (x * x).sum(-1, keepdim=True) * 1e-9], -1)

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Squares(), nn.Linear(9, 3))
        with torch.no_grad():
            model[0].weight.mul_(2000.0)
        return model


FP16 = {"compute": "fp16", "init_scale": 4.0, "min_scale": 1.0}


def test_an_overflow_in_a_sum_of_squares_ends_the_run_by_name_and_the_module_kept_in_fp32_cures_it(
    tmp_path: Path,
) -> None:
    how = spec(12, precision=FP16, optim={"lr": 1e-4})
    with (
        pytest.raises(NumbersError) as ended,
        Run(how, Summing(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            pass
    assert "mul in 1 overflows in fp16; its largest input is" in ended.value.message
    assert ended.value.hint == 'set precision.keep = ["1"]'
    with Run(
        how.replace(precision={"keep": ["1"]}), Summing(), folder=tmp_path / "b", quiet=True
    ) as run:
        assert [report.applied for report in run.steps()][-6:] == [True] * 6


def test_a_norm_that_overflows_in_silence_is_seen_by_its_operator_and_keeping_it_in_fp32_cures_it(
    tmp_path: Path,
) -> None:
    """Infinite squares make a norm that gives zeros: the loss is finite and nothing is learned."""
    found = {}
    for name, more in (("a", {}), ("b", {"keep": ["1"]})):
        with Run(
            spec(2, precision={**FP16, **more}), Large(), folder=tmp_path / name, quiet=True
        ) as run:
            for _ in run.steps():
                pass
            found[name] = find_overflow(run.assembly, 1)
    assert found["a"] is not None
    assert (found["a"].module, found["a"].operator, found["a"].remedy) == (
        "1",
        "mul",
        'precision.keep = ["1"]',
    )
    assert found["b"] is None


def test_a_scale_that_halves_for_ever_is_ended_and_the_format_that_needs_none_cures_it(
    tmp_path: Path,
) -> None:
    class Steep(Small):
        """The gradient of its loss overflows fp16 at any scale that the spec allows."""

        def loss(self, output: Tensor, batch: Any) -> Any:
            return super().loss(output * 1e4 + (output * 3e4).detach(), batch)

    how = spec(12, precision={"compute": "fp16", "min_scale": 2.0**14}, optim={"lr": 1e-9})
    with (
        pytest.raises(NumbersError, match="the scale is below this minimum") as ended,
        Run(how, Steep(), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            pass
    assert 'precision.compute = "bf16"' in str(ended.value.hint)
    cured = spec(12, precision={"compute": "bf16"}, optim={"lr": 1e-9})
    with Run(cured, Steep(), folder=tmp_path / "b", quiet=True) as run:
        assert all(report.applied for report in run.steps())


def gradient_of(model: nn.Module, compute: Any, scale: float) -> tuple[Tensor, Watch]:
    model.zero_grad()
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    with Watch(model, scale=scale, scales=(1.0, scale)) as watch:
        with compute_context(compute, CPU)():
            loss = model(x).float().pow(2).mean() * 1e-7
        (loss * scale).backward()
    weight = model[0].weight  # type: ignore[index]
    return weight.grad / scale, watch


def test_gradients_that_vanish_in_fp16_are_counted_by_module_and_the_advised_scale_helps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    true, watch = gradient_of(model, "fp32", 1.0)
    rows = watch.flushed()
    assert total(rows, 1.0) > 0.9
    assert {row.module for row in rows} == {
        "0",
        "1",
        "2",
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }
    lost, _ = gradient_of(model, "fp16", 1.0)
    assert float((lost == 0).float().mean()) > 0.5
    scale = advise_scale(rows)
    kept, watch = gradient_of(model, "fp16", scale)
    assert watch.overflow is None
    torch.testing.assert_close(kept, true, rtol=0.05, atol=float(true.abs().max()) * 0.01)


@pytest.mark.parametrize("with_masters", [True, False])
def test_updates_that_bf16_rounds_away_are_counted_and_a_master_keeps_them(
    with_masters: bool,
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    store_narrow(model, with_masters=with_masters)
    update = GuardedUpdate(
        [torch.optim.SGD([master_of(p) for p in model.parameters()], lr=1e-3, fused=True)]
    )
    before = {name: master_of(p).detach().clone() for name, p in model.named_parameters()}
    with compute_context("bf16", CPU)():
        loss = model(torch.randn(16, 32)).float().pow(2).mean()
    loss.backward()
    moved = {name: master_of(p).grad for name, p in model.named_parameters()}
    update.step_if_finite()
    publish(model.parameters())
    after = {name: master_of(p).detach() for name, p in model.named_parameters()}
    lost = count_lost(before, after, moved)  # type: ignore[arg-type]
    assert lost["weight"] < 0.01 if with_masters else lost["weight"] > 0.9


def test_clipping_before_unscaling_is_seen_by_the_norm_and_the_right_order_cures_it() -> None:
    weight = nn.Parameter(torch.ones(4))
    scaler, clip = LossScaler(), 1.0

    def backward() -> None:
        weight.grad = None
        (weight * torch.tensor([3.0, 4.0, 0.0, 0.0])).sum().backward(torch.tensor(scaler.scale))  # type: ignore[no-untyped-call]

    backward()
    nn.utils.clip_grad_norm_([weight], clip)  # planted: the gradient is still scaled
    assert weight.grad is not None
    norm = float(weight.grad.norm()) / float(scaler.scale)
    assert was_clipped_first(norm, scale=float(scaler.scale), clip=clip)
    backward()
    update = GuardedUpdate([torch.optim.SGD([weight], lr=1.0, fused=True)], clip=clip)
    before = weight.detach().clone()
    update.step_if_finite(1 / scaler.scale)
    assert not was_clipped_first(
        float((before - weight.detach()).norm()), scale=float(scaler.scale), clip=clip
    )
    assert float((before - weight.detach()).norm()) == pytest.approx(1.0, rel=1e-5)


def test_a_watch_leaves_nothing_behind_and_names_what_overflows_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    keep_in_fp32(model, [])
    with torch.no_grad():
        model[1].weight.fill_(3e38)
    with Watch(model) as watch:
        F.relu(model(torch.full((2, 4), 100.0))).sum().backward()
    assert watch.overflow is not None
    assert (watch.overflow.module, watch.overflow.direction, watch.overflow.remedy) == (
        "1",
        "forward",
        None,
    )
    assert all(not module._forward_hooks for module in model.modules())
