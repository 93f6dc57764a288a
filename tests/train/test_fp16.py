"""fp16 in a run: the scale moves as it should, and a step that overflows moves nothing else.

All of it goes on after a stop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.events import Started, Step
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import NumbersError, SpecError
from surefoot.train.run import Run
from tests.train.small import (
    OPTIMIZERS,
    Odd,
    Small,
    assert_same,
    end_of,
    faults_of,
    records,
    spec,
    state_of,
)


def fp16(steps: int, **tables: dict[str, Any]) -> RunSpec:
    precision = {"compute": "fp16", **tables.pop("precision", {})}
    return spec(
        steps,
        precision=precision,
        observe={"every": "1 step", **tables.pop("observe", {})},
        **tables,
    )


def scales(folder: Path) -> list[float | None]:
    return [event.loss_scale for event in records(folder) if isinstance(event, Step)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_injected_overflow_halves_the_scale_once_and_moves_nothing_else(
    name: str, tmp_path: Path
) -> None:
    table = {**OPTIMIZERS[name], "lr": 0.05, "ema": 0.9}
    how = fp16(9, optim=table, precision={"init_scale": 256.0, "growth_interval": 2})
    before: dict[str, Any] = {}
    with Run(how, Odd("finite loss, inf gradient"), folder=tmp_path / "a", quiet=True) as run:
        for report in run.steps():
            assert report.applied is (report.step != 4)
            assert report.overflowed is (report.step == 4)
            if report.step == 3:
                before, rates = state_of(run), run.assembly.updates[0].guarded.rates
            if report.step == 4:
                assert_same(before, state_of(run))
                assert run.assembly.updates[0].guarded.rates == rates
                assert run.assembly.updates[0].guarded.applied_steps == 3
    high = 256.0
    assert scales(tmp_path / "a") == [
        high,
        2 * high,
        2 * high,
        high,
        high,
        2 * high,
        2 * high,
        4 * high,
        4 * high,
    ]
    (fault,) = faults_of(tmp_path / "a")
    assert (fault.step, fault.fault, fault.action) == (
        4,
        "overflow",
        "the step was skipped, no weight changed; the loss scale is now 256",
    )
    assert "overflowed fp16 at a loss scale of 512" in fault.detail
    assert (run.outcome, run.num_skipped) == ("finished", 1)


def test_a_scale_that_begins_too_high_comes_down_by_itself(tmp_path: Path) -> None:
    how = fp16(60, precision={"init_scale": 2.0**30}, stability={"max_skips": 2})
    with Run(how, Small(), folder=tmp_path / "a", quiet=True) as run:
        applied = [report.applied for report in run.steps()]
    # even before any update, and more often in a row than max_skips
    assert applied[:3] == [False] * 3
    assert all(applied[20:])
    assert scales(tmp_path / "a")[-1] == 2.0 ** (30 - applied.count(False))


def test_a_scale_that_would_halve_for_ever_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    how = fp16(50, precision={"min_scale": 2.0**10})
    with (
        pytest.raises(
            NumbersError, match=r"precision\.min_scale is 1024: the scale is below this minimum"
        ),
        Run(how, Odd("finite loss, inf gradient", 99), folder=tmp_path / "a", quiet=True) as run,
    ):
        for _ in run.steps():
            pass
    end = end_of(tmp_path / "a")
    assert (end.outcome, end.exit_code, end.step) == ("failed", 4, 3 + 7)  # 2^16 halves seven times
    assert len(faults_of(tmp_path / "a")) == 7


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale(tmp_path: Path) -> None:
    with Run(fp16(8), Odd("nan loss, finite gradient"), folder=tmp_path / "a", quiet=True) as run:
        for _ in run.steps():
            pass
    assert scales(tmp_path / "a") == [2.0**16] * 8
    assert [event.fault for event in faults_of(tmp_path / "a")] == ["nonfinite"]


class Halves(Small):
    """As many samples of a batch as wanted multiply the gradient by infinity."""

    def __init__(self, poisoned: int | None = None) -> None:
        super().__init__()
        self.poisoned = poisoned

    def loss(self, output: Any, batch: Any) -> Any:
        if (
            output.requires_grad
            and self.poisoned is not None
            and bool((batch[2] == self.poisoned).any())
        ):
            output.register_hook(lambda gradient: gradient * torch.inf)
        return super().loss(output, batch)

    def data(self, split: str) -> Arrays:
        source = super().data(split)
        x, y = source.read(torch.arange(len(source)).numpy())
        return Arrays(x, y, torch.arange(len(y)))

    def augment(self, batch: Any, keys: Any) -> Any:
        return batch


@pytest.mark.parametrize("poisoned", [None, 5])
def test_microbatches_share_one_scale_and_one_that_overflows_discards_the_step(
    poisoned: int | None, tmp_path: Path
) -> None:
    told = {}
    for microbatch in (None, 1):
        train = {} if microbatch is None else {"microbatch": microbatch}
        with Run(
            fp16(12, train=train), Halves(poisoned), folder=tmp_path / str(microbatch), quiet=True
        ) as run:
            applied = [report.applied for report in run.steps()]
        told[microbatch] = (
            applied,
            scales(tmp_path / str(microbatch)),
            {k: v.clone() for k, v in run.model.state_dict().items()},
        )
    assert told[None][:2] == told[1][:2]
    # 12 steps of 4 are two passes over 24 samples
    assert told[None][0].count(False) == (0 if poisoned is None else 2)
    for name, tensor in told[None][2].items():
        torch.testing.assert_close(tensor, told[1][2][name], rtol=2e-3, atol=2e-3)


def test_fp16_with_its_scale_learns_what_fp32_learns(tmp_path: Path) -> None:
    losses = {}
    for name, how in (("fp32", spec(12)), ("fp16", fp16(12))):
        with Run(how, Small(), folder=tmp_path / name, quiet=True) as run:
            losses[name] = [report.loss for report in run.steps()]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=5e-3)
    assert losses["fp16"] != losses["fp32"]


def test_auto_says_what_it_took_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run(spec(2, precision={"compute": "auto"}), Small(), folder=tmp_path / "a") as run:
        for _ in run.steps():
            pass
        found = run.evaluate()
    started = next(event for event in records(tmp_path / "a") if isinstance(event, Started))
    assert started.precision["compute"] == run.assembly.engine.policy.compute == found.precision
    assert str(started.precision["why"]).startswith("auto: ")
    assert f"computing in {found.precision} (auto: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            {"compute": "bf16", "init_scale": 1024.0},
            "the other formats have the range of fp32",
        ),
        ({"growth_interval": 5}, "need no loss scaling"),
        ({"compute": "fp16", "init_scale": 1000.0}, "is not a power of two"),
        (
            {"compute": "fp16", "init_scale": 2.0, "min_scale": 4.0},
            "is above init_scale = 2\nhint: use a smaller min_scale",
        ),
        (
            {"compute": "fp16", "init_scale": 0.5},
            "is above init_scale = 0.5\nhint: use a larger init_scale",
        ),
        ({"compute": "fp17"}, "did you mean 'fp16'"),
    ],
)
def test_a_scale_that_makes_no_sense_is_refused_with_the_explanation(
    table: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError) as refused:
        RunSpec(precision=table)
    assert says in str(refused.value)


def test_a_precision_that_the_device_lacks_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with (
        pytest.raises(SpecError, match="tf32"),
        Run(
            spec(2, precision={"compute": "tf32"}, train={"device": "cpu"}),
            Small(),
            folder=tmp_path / "a",
            quiet=True,
        ),
    ):
        pass
    assert not (tmp_path / "a").exists()
    assert torch.backends.cuda.matmul.fp32_precision == before
