"""bf16 weights with fp32 masters, and modules that are kept in fp32.

And what is evaluated, saved and gone on with.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot.components import checkpoint
from surefoot.components.checkpoint import Commit
from surefoot.components.optim.masters import publish, store_narrow
from surefoot.components.optim.update import GuardedUpdate
from surefoot.components.precision.keep import keep_in_fp32
from surefoot.components.precision.policy import compute_context
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import master_of
from surefoot.core.errors import SpecError
from surefoot.prove.whatif.noise import measure_noise
from surefoot.train.look_back import evaluate_run
from surefoot.train.resume.start import Start
from surefoot.train.run import Run
from tests.train.small import OPTIMIZERS, Small, spec, write_task
from tests.train.test_resume import STEPS, STOP, Rich, bits, train

BF16 = {"compute": "bf16", "weights": "bf16"}


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("with_masters", [True, False])
def test_updates_of_a_ten_thousandth_to_a_weight_of_one_are_lost_without_a_master_and_kept_with_one(
    with_masters: bool,
) -> None:
    model = One()
    assert store_narrow(model, with_masters=with_masters) == ["weight"]
    update = GuardedUpdate([torch.optim.SGD([master_of(model.weight)], lr=1.0, fused=True)])
    for _ in range(100):
        update.clear_gradients()
        (model.weight * -1e-4).sum().backward()
        update.step_if_finite()
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.item() == pytest.approx(1.01 if with_masters else 1.0, rel=2**-8)
    assert (model.weight.item() == 1.0) is (not with_masters)
    assert master_of(model.weight).item() == pytest.approx(1.01 if with_masters else 1.0, rel=1e-3)


def test_gradients_of_many_microbatches_are_summed_up_in_fp32() -> None:
    model = One()
    store_narrow(model)
    for _ in range(512):  # in bf16 1 + 1 + ... ends at 256
        (model.weight * 1.0).sum().backward()
    master = master_of(model.weight)
    assert master.grad is not None
    assert (master.grad.dtype, float(master.grad)) == (torch.float32, 512.0)
    assert model.weight.grad is None


def test_a_loop_of_ones_own_publishes_what_its_optimizer_moved() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert store_narrow(model) == ["0.weight", "0.bias"]
    assert {name: p.dtype for name, p in model.named_parameters() if p.dtype != torch.bfloat16} == {
        "1.weight": torch.float32,
        "1.bias": torch.float32,
    }
    optimizer = torch.optim.SGD([master_of(parameter) for parameter in model.parameters()], lr=0.5)
    with compute_context("bf16", torch.device("cpu"))():
        model(torch.ones(1, 2)).pow(2).sum().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    publish(model.parameters())
    assert torch.equal(model[0].weight, master_of(model[0].weight).bfloat16())


@pytest.mark.quick("adamw", "muon", "sgd")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_bf16_weights_follows_the_one_with_fp32_weights(
    name: str, tmp_path: Path
) -> None:
    losses: dict[str, list[float]] = {}
    for kind, table in (("fp32", {"compute": "bf16"}), ("bf16", BF16)):
        how = spec(12, precision=table, optim={**OPTIMIZERS[name], "lr": 0.01, "ema": 0.5})
        with Run(how, Small(norm=True), folder=tmp_path / kind, quiet=True) as run:
            losses[kind] = [report.loss for report in run.steps()]
            run.evaluate()
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.03)
    stored = {name: parameter.dtype for name, parameter in run.model.named_parameters()}
    # BatchNorm
    assert {name for name, dtype in stored.items() if dtype == torch.float32} == {
        "1.weight",
        "1.bias",
    }
    for update in run.assembly.updates:
        for optimizer in update.guarded.optimizers:
            kept = [
                v
                for state in optimizer.state.values()
                for v in state.values()
                if isinstance(v, Tensor)
            ]
            assert {each.dtype for each in kept} <= {torch.float32}
    assert {
        tensor.dtype
        for tensor in surefoot.load(tmp_path / "bf16", task=Small(norm=True)).parameters()
    } == {torch.float32}


HOW: dict[str, dict[str, Any]] = {
    "masters": {"precision": BF16},
    "masters and an average": {"precision": BF16, "optim": {"ema": 0.9}},
    "masters and microbatches": {"precision": BF16, "train": {"microbatch": 2}},
    "masters and muon": {"precision": BF16, "optim": {"name": "muon"}},
    "no masters": {"precision": {**BF16, "master": "none"}},
    "a module that is kept": {"precision": {"compute": "bf16", "keep": ["4"]}},
}


@pytest.mark.quick("masters and microbatches")
@pytest.mark.parametrize("name", HOW)
def test_a_run_that_was_left_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    how = spec(STEPS, checkpoint={"every": "5 steps"}, **HOW[name])
    train(tmp_path / "whole", how, Rich())
    train(tmp_path / "left", how, Rich(), leave_at=STOP)
    train(tmp_path / "left", how, Rich())
    assert bits(tmp_path / "left") == bits(tmp_path / "whole")


def test_saved_weights_are_evaluated_as_the_run_evaluated_them(tmp_path: Path) -> None:
    use = write_task(tmp_path)
    for number, table in enumerate(
        (BF16, {**BF16, "master": "none"}, {"compute": "bf16", "keep": ["2.*"]})
    ):
        how = RunSpec(
            task={"use": use},
            precision=table,
            train={"length": "8 steps", "batch": 4},
            observe={"tensorboard": False},
        )
        with Run(how, folder=tmp_path / str(number), quiet=True) as run:
            for _ in run.steps():
                pass
            own = run.evaluate()
        results, _ = evaluate_run(tmp_path / str(number), "last", None, None, fp32=True)
        assert [each.precision for each in results] == ["bf16", "fp32"]
        assert results[0].value == own.value
        assert results[1].value == pytest.approx(own.value, rel=0.02)


class Seen(nn.Module):
    """Remembers the dtype that it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dtypes = nn.Linear(4, 4), list[torch.dtype]()

    def forward(self, x: Tensor, pair: tuple[Tensor, int] | None = None) -> Tensor:
        out: Tensor = self.linear(x)
        self.dtypes.append(out.dtype)
        return out if pair is None else out + pair[0]


def build() -> nn.ModuleDict:
    return nn.ModuleDict({"body": Seen(), "head": Seen(), "tail": nn.ModuleDict({"inner": Seen()})})


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["head.*"], {"head"}),
        (["head"], {"head"}),
        (["tail.*"], {"tail"}),
        (["*.linear"], {"body", "head", "tail"}),
        ([], set()),
    ],
)
def test_a_module_that_is_kept_computes_in_fp32_and_so_does_its_copy(
    patterns: list[str], kept: set[str]
) -> None:
    model = build()
    keep_in_fp32(model, patterns)
    keep_in_fp32(model, patterns)  # twice is once
    both = copy.deepcopy(model)
    with torch.no_grad():
        both["head"].linear.weight.zero_()  # type: ignore[union-attr]
    for each in (model, both):
        with compute_context("bf16", torch.device("cpu"))():
            half = (torch.ones(2, 4) @ torch.ones(4, 4)).bfloat16()
            outs = {
                name: part(half, (half, 1))
                for name, part in (("body", each["body"]), ("head", each["head"]))
            }
            each["tail"]["inner"](half)  # type: ignore[index]
        assert bool(
            (outs["head"].float() - half.float() - each["head"].linear.bias).abs().max() < 0.1
        ) is (each is both)  # type: ignore[union-attr]
    seen = {"body": model["body"], "head": model["head"], "tail": model["tail"]["inner"]}  # type: ignore[index]
    assert {name for name, part in seen.items() if part.dtypes == [torch.float32]} == kept  # type: ignore[union-attr]


def test_a_pattern_that_matches_nothing_is_refused_with_near_names(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        keep_in_fp32(build(), ["haed.*"])
    assert "'haed.*' matches no module" in str(refused.value)
    assert "did you mean head" in str(refused.value)
    with (
        pytest.raises(SpecError, match="matches no module"),
        Run(spec(2, precision={"compute": "bf16", "keep": ["x"]}), Small(), folder=tmp_path / "a"),
    ):
        pass
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "table", [{"weights": "bf16"}, {"weights": "bf16", "compute": "fp16"}, {"master": "none"}]
)
def test_storage_that_does_not_go_together_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(
        SpecError, match=r"set (compute|weights) = 'bf16'|set precision\.weights to \"bf16\""
    ):
        RunSpec(precision=table)


def test_a_pure_bf16_run_is_finite_and_an_update_in_the_backward_pass_knows_no_masters(
    tmp_path: Path,
) -> None:
    with Run(
        spec(4, precision={**BF16, "master": "none"}), Small(), folder=tmp_path / "a", quiet=True
    ) as run:
        assert all(math.isfinite(report.loss) for report in run.steps())
    with pytest.raises(SpecError, match="master weights collect"):
        RunSpec(
            precision=BF16,
            optim={"clip": 0.0},
            stability={"nonfinite": "stop"},
            memory={"update_in_backward": True},
        )


def saved(folder: Path, step: int) -> dict[str, Tensor]:
    return Commit(folder, step).read(checkpoint.MODEL)


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_a_run_that_begins_with_the_weights_of_another_trains_from_them(
    weights: str, tmp_path: Path
) -> None:
    """Its masters are what is updated, and are rounded into the weights after each step."""
    train(
        tmp_path / "first",
        spec(4, precision={"compute": "bf16", "weights": weights}),
        Small(norm=True),
    )
    still = spec(2, precision=BF16, optim={"lr": 0.0, "ema": 0.5})
    with Run(
        still,
        Small(norm=True),
        folder=tmp_path / "next",
        quiet=True,
        start=Start(tmp_path / "first", 4, True),
    ) as run:
        for _ in run.steps():
            pass
    expected = saved(tmp_path / "first", 4)
    for name, parameter in run.model.named_parameters():
        assert torch.equal(master_of(parameter), expected[name]), name
        assert torch.equal(parameter, expected[name].to(parameter.dtype)), name
        assert torch.equal(saved(tmp_path / "next", 2)[name], expected[name]), name


def test_a_loop_of_ones_own_saves_the_masters_and_goes_on_with_them(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        store_narrow(model)
        return model, torch.optim.SGD(
            [master_of(parameter) for parameter in model.parameters()], lr=1e-4
        )

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with compute_context("bf16", torch.device("cpu"))():
            model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        publish(model.parameters())

    model, optimizer = build()
    other, another = build()
    for _ in range(3):
        step(model, optimizer)
    checkpoint.save(tmp_path, 3, {"model": model, "optimizer": optimizer})
    checkpoint.load(tmp_path, {"model": other, "optimizer": another})
    for _ in range(3):
        step(model, optimizer)
        step(other, another)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(master_of(mine), master_of(theirs))
    assert {tensor.dtype for tensor in saved(tmp_path, 3).values()} == {torch.float32}


def test_a_model_with_frozen_weights_is_taken_back_in_fp32_and_evaluated_as_the_run_did(
    tmp_path: Path,
) -> None:
    how = RunSpec(
        task={"use": write_task(tmp_path)},
        precision=BF16,
        optim={"freeze": ["0.*"]},
        train={"length": "4 steps", "batch": 4},
        observe={"tensorboard": False},
    )
    with Run(how, folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            pass
        own = run.evaluate()
    model = surefoot.load(tmp_path / "run")
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert torch.equal(model.get_parameter("0.weight"), run.model.get_parameter("0.weight").float())
    results, _ = evaluate_run(tmp_path / "run", "last", None, None)
    assert results[0].value == own.value
    assert measure_noise(how, run=tmp_path / "run", size=2, draws=16).mean_norm > 0


def test_a_norm_keeps_its_own_weights_and_not_those_of_what_stands_inside() -> None:
    class NormedNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inside = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)

    model = NormedNet()
    assert store_narrow(model) == ["inside.weight", "inside.bias"]
