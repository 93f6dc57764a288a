"""float8 in the products of linear layers.

What is converted and why not, what it learns, and what is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surefoot
from surefoot.components.precision.float8 import find_linear, to_float8
from surefoot.components.precision.keep import keep_in_fp32
from surefoot.components.precision.policy import FormatSupport, choose, compute_context
from surefoot.contract.events import Dtypes, Started
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import InputError, SpecError
from surefoot.prove.memory import predict
from surefoot.train.look_back import evaluate_run
from surefoot.train.run import Run, drive
from tests.train.small import Small, call, records, spec
from tests.train.test_resume import STEPS, STOP, Rich, bits, train

FLOAT8 = {"compute": "float8", "emulate": True}


class Deep(Rich):
    """Two layers that fit between a first and a last one that do not."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        inside = (nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), *inside, nn.Linear(32, 3))


class Block(nn.Module):
    """Two equal layers and an attention whose own layer nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(32, 32), nn.Linear(32, 48, bias=False)
        self.attention = nn.MultiheadAttention(32, 2)


def test_every_linear_layer_is_told_with_what_was_done_and_why_not() -> None:
    model = nn.ModuleDict(
        {"odd": nn.Linear(20, 32), "a": Block(), "b": Block(), "head": nn.Linear(32, 64)}
    )
    kept = keep_in_fp32(model, ["b"])
    before = {name: parameter for name, parameter in model.named_parameters()}  # noqa: C416
    done = to_float8(model, kept.values(), emulate=True)
    assert done.layers == ("a.query", "a.value")
    assert done.skipped == {
        "odd": "in_features 20 is not a multiple of 16",
        "a.attention.out_proj": "a NonDynamicallyQuantizableLinear may be computed elsewhere",
        "b.query": "precision.keep",
        "b.value": "precision.keep",
        "b.attention.out_proj": "precision.keep",
        "head": "the last linear layer: the loss sees what it rounds",
    }
    assert done.notes[0] == "multiplying in float8: a.query, a.value"
    assert "not in float8: odd (in_features 20 is not a multiple of 16)" in done.notes
    assert find_linear(model, kept.values()) == done  # what was done is what is told afterwards
    assert {
        name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"
    } == {*done.layers}
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_a_converted_layer_keeps_its_hooks_its_attributes_and_its_other_places() -> None:
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict(
        {"first": shared, "again": nn.ModuleDict({"same": shared}), "head": nn.Linear(32, 3)}
    )
    seen: list[str] = []
    handle = shared.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    shared.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    shared.initial_scale = 0.5  # type: ignore[assignment]
    x = torch.randn(16, 32)
    rounded = F.linear(x + 1, shared.weight, shared.bias)
    assert to_float8(model, emulate=True).layers == ("first",)
    assert model["first"] is model["again"]["same"] is shared
    assert shared.initial_scale == 0.5
    torch.testing.assert_close(model["again"]["same"](x), rounded, atol=0.3, rtol=0.1)
    assert seen == ["Float8Linear"]
    handle.remove()
    model["first"](x)
    assert seen == ["Float8Linear"]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_layer_whose_weight_something_computes_is_left_alone() -> None:
    model = nn.Sequential(
        nn.utils.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32), nn.Linear(32, 3)
    )
    done = to_float8(model, emulate=True)
    assert done.layers == ("1",)
    assert done.skipped["0"] == "its weight is not a parameter: something computes it"


def test_products_are_those_of_rounded_numbers_forward_and_backward() -> None:
    def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = (torch.finfo(dtype).max / tensor.abs().max().double()).float()
        return (tensor.float() * scale).to(dtype).float() / scale

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 3))
    weight = model[0].weight.detach().clone()
    to_float8(model)
    x, upstream = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48)
    out = model[0](x)
    out.backward(upstream)
    x8, w8, g8 = (
        rounded(x.detach(), torch.float8_e4m3fn),
        rounded(weight, torch.float8_e4m3fn),
        rounded(upstream, torch.float8_e5m2),
    )
    torch.testing.assert_close(out, x8 @ w8.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, g8 @ w8, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model[0].weight.grad, g8.T @ x8, rtol=1e-5, atol=1e-5)
    assert (out - x @ weight.T).abs().max() > 1e-2  # rounded indeed
    with compute_context("float8", torch.device("cpu"))():
        assert model(x).dtype == torch.bfloat16


def learned(compute: Mapping[str, Any], seed: int, folder: Path) -> float:
    how = spec(60, precision=dict(compute), optim={"lr": 0.01}, train={"seed": seed, "batch": 8})
    with Run(how, Deep(), folder=folder / f"{compute['compute']}-{seed}", quiet=True) as run:
        losses = [report.loss for report in run.steps()]
    return sum(losses[-20:]) / 20


def test_the_loss_is_that_of_bf16_within_the_spread_of_its_seeds(tmp_path: Path) -> None:
    found = {
        name: [learned(how, seed, tmp_path) for seed in range(3)]
        for name, how in (("bf16", {"compute": "bf16"}), ("float8", FLOAT8))
    }
    spread = max(found["bf16"]) - min(found["bf16"])
    assert abs(sum(found["float8"]) - sum(found["bf16"])) / 3 <= spread
    assert max(found["float8"]) < 1.0  # 1.1 is what knows nothing


def test_a_run_is_recorded_resumed_to_its_bits_saved_in_plain_weights_and_evaluated(
    tmp_path: Path,
) -> None:
    how = spec(STEPS, checkpoint={"every": "5 steps"}, precision=FLOAT8)
    train(tmp_path / "whole", how, Deep())
    train(tmp_path / "left", how, Deep(), leave_at=STOP)
    train(tmp_path / "left", how, Deep())
    assert bits(tmp_path / "left") == bits(tmp_path / "whole")
    started = next(each for each in records(tmp_path / "whole") if isinstance(each, Started))
    assert started.precision == {
        "compute": "float8",
        "why": "as the spec says; emulated: its numbers, and not its speed",
    }
    assert {
        "multiplying in float8: 2, 5",
        "not in float8: 0 (in_features 4 is not a multiple of 16)",
    } <= {*started.notes}
    seen = next(each for each in records(tmp_path / "whole") if isinstance(each, Dtypes))
    roles = {name: row for row in seen.parameters for name in row["names"]}
    assert [roles["2.weight"][role] for role in ("storage", "compute", "gradient", "master")] == [
        "fp32",
        "fp32, e4m3",
        "fp32",
        "fp32",
    ]
    assert roles["0.weight"]["compute"] == "bf16"
    assert "e5m2 and e4m3" in seen.operators["mm"]
    model = surefoot.load(tmp_path / "whole", "last", task=Deep())
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {
        nn.Linear
    }


DEEP = """
import torch
from torch import nn
from tests.train.small import Small

class Mine(Small):
    def model(self):
        layers = nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
        return nn.Sequential(*layers)
"""


def test_what_was_saved_is_evaluated_as_the_run_did_and_in_fp32_without_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(DEEP)
    tables = {"task": {"use": f"{tmp_path / 'mine.py'}:Mine"}, "observe": {"tensorboard": False}}
    how = RunSpec(**tables, precision=FLOAT8, train={"length": "8 steps", "batch": 4})
    with Run(how, folder=tmp_path / "run", quiet=True) as run:
        drive(run)
        own = run.evaluate()
    results, _ = evaluate_run(tmp_path / "run", "last", None, None, fp32=True)
    assert [each.precision for each in results] == ["float8", "fp32"]
    assert results[0].loss == own.loss
    plain, _ = evaluate_run(tmp_path / "run", "last", None, None)
    assert plain[0].loss == own.loss != results[1].loss
    inputs, targets = Small().data("test").read(np.arange(24))
    with torch.no_grad():
        expected = F.cross_entropy(surefoot.load(tmp_path / "run", "last")(inputs), targets)
    assert results[1].loss == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(InputError, match="float8 matmuls is known only from a run"):
        predict(how)
    assert call(monkeypatch, "explain", str(tmp_path / "run" / "spec.toml")) == 0
    told = capsys.readouterr().out
    assert "computing in float8" in told
    assert "multiplying in float8: 2" in told


@pytest.mark.parametrize(
    "units",
    [
        FormatSupport("cpu", "a CPU", frozenset({"bf16"})),
        FormatSupport("cuda", "A100", frozenset({"bf16", "tf32", "fp16"})),
    ],
)
def test_a_device_without_units_for_float8_is_refused_with_the_reason_unless_it_is_emulated(
    units: FormatSupport,
) -> None:
    with pytest.raises(
        SpecError, match=rf"'float8', which {units.name} lacks: it has no units for float8"
    ) as refused:
        choose("float8", units)
    assert refused.value.hint == (
        "GPUs have them since Ada and Hopper (2022); "
        "precision.emulate = true gives its numbers without them, slowly"
    )
    assert choose("float8", units, emulate=True)[0] == "float8"
    assert choose("float8", FormatSupport("cuda", "H100", units.formats | {"float8"})) == (
        "float8",
        "as the spec says",
    )


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            {"compute": "bf16", "emulate": True},
            r'precision\.emulate = true has no effect with precision\.compute = "bf16"',
        ),
        ({"compute": "float8", "weights": "bf16"}, "weights = 'bf16' with compute = 'float8'"),
        (
            {"compute": "float8", "init_scale": 2.0},
            r'precision\.init_scale = 2.0 has no effect with precision\.compute = "float8"',
        ),
    ],
)
def test_what_does_not_go_together_is_refused(table: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        RunSpec(precision=table)


def test_a_model_of_which_nothing_can_be_converted_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        SpecError, match=r"no linear layer of the model is: not in float8: 0 \(in_features 4 is not"
    ) as refused:
        Run(spec(2, precision=FLOAT8), Small(), folder=tmp_path / "run").__enter__()
    assert "multiples of 16" in str(refused.value.hint)
    with pytest.raises(SpecError, match="has no units for float8"):
        Run(
            spec(2, precision={"compute": "float8"}, train={"device": "cpu"}),
            Deep(),
            folder=tmp_path / "run",
        ).__enter__()
    assert not (tmp_path / "run").exists()
