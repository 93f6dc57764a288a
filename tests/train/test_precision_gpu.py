"""Precision on a GPU: the formats that it has units for, and a loss scale that nobody waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.components.precision.policy import choose, find_units, set_products
from surefoot.train.run import Run
from tests.train.small import Odd, Small, assert_same, faults_of, spec, state_of
from tests.train.test_fp16 import scales

pytestmark = pytest.mark.gpu
CUDA = {"device": "cuda"}


def test_a_gpu_says_what_it_has_units_for() -> None:
    units = find_units(torch.device("cuda"))
    major = torch.cuda.get_device_capability()[0]
    assert ("bf16" in units.formats) is ("tf32" in units.formats) is (major >= 8)
    assert choose("auto", units)[0] == ("bf16" if major >= 8 else "fp16" if major == 7 else "fp32")


@pytest.mark.parametrize("compute", ["fp32", "tf32", "bf16", "fp16"])
def test_every_format_learns_what_fp32_learns(compute: str, tmp_path: Path) -> None:
    losses = {}
    for name in ("fp32", compute):
        how = spec(12, train=CUDA, precision={"compute": name})
        with Run(how, Small(), folder=tmp_path / name / compute, quiet=True) as run:
            losses[name] = [report.loss for report in run.steps()]
    assert losses[compute] == pytest.approx(losses["fp32"], rel=2e-2)


def test_the_scale_is_decided_on_the_device_and_an_overflow_moves_nothing_else(
    tmp_path: Path,
) -> None:
    how = spec(
        9,
        train=CUDA,
        precision={"compute": "fp16", "init_scale": 256.0, "growth_interval": 2},
        observe={"every": "1 step"},
    )
    before: dict[str, Any] = {}
    with Run(how, Odd("finite loss, inf gradient"), folder=tmp_path / "a", quiet=True) as run:
        scaler = run.assembly.engine.policy.scaler
        assert scaler is not None
        assert isinstance(scaler.scale, torch.Tensor)
        assert scaler.scale.device.type == "cuda"
        for report in run.steps():
            assert report.applied is (report.step != 4)
            if report.step == 3:
                before = state_of(run)
            if report.step == 4:
                assert_same(before, state_of(run))
    assert scales(tmp_path / "a") == [
        256.0,
        512.0,
        512.0,
        256.0,
        256.0,
        512.0,
        512.0,
        1024.0,
        1024.0,
    ]
    (fault,) = faults_of(tmp_path / "a")
    assert (fault.step, fault.fault) == (4, "overflow")


def test_fp32_means_fp32_in_products_and_convolutions_and_tf32_does_not() -> None:
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("the GPU has no tf32")
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(256, 256, device="cuda", generator=generator) for _ in range(2))
    images, filters = (
        torch.randn(8, 64, 16, 16, device="cuda", generator=generator),
        torch.randn(64, 64, 3, 3, device="cuda"),
    )
    off = {}
    for compute in ("fp32", "tf32"):
        put_back = set_products(compute)
        product = ((a @ b).double() - a.double() @ b.double()).abs().max()
        convolved = torch.nn.functional.conv2d(images, filters)
        exact = torch.nn.functional.conv2d(images.double(), filters.double())
        off[compute] = (float(product), float((convolved.double() - exact).abs().max()))
        put_back()
    assert all(one * 20 < other for one, other in zip(off["fp32"], off["tf32"], strict=True)), off
