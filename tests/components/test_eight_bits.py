"""Tests of moments in 8 bits.

The same as torchao's own optimizer bit for bit, a quarter of the bytes, and everything a run does
with its state.
"""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.components.optim.build import Built
from surefoot.components.optim.build import build as build_optimizer
from surefoot.components.optim.groups import find_trained
from surefoot.components.optim.kinds import eight_bits
from surefoot.components.optim.kinds.eight_bits import Adam8bit
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.events import Dtypes, Started
from surefoot.contract.spec import OptimTable, RunSpec
from surefoot.core.errors import InputError, MissingExtra, SpecError
from surefoot.prove.memory import compare, predict
from surefoot.runtime.lowbit import torchao
from surefoot.train.run import Run, drive
from tests.train.small import call, records, spec
from tests.train.test_resume import STEPS, STOP, Rich, bits, train

STATE = {"state": "8bit"}
BITS_8, BITS_32 = (
    {"task": {"use": "digits", "width": 16}, "optim": {"lr": 0.005, **more}} for more in (STATE, {})
)


class Wide(Rich):
    """Two matrices of whole blocks; what stands between them is too small."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 1536), nn.BatchNorm1d(1536), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1536, 3)
        )


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 32, 4),
        nn.Flatten(),
        nn.Linear(32, 192, bias=False),
        nn.Tanh(),
        nn.Linear(192, 3),
    )


def gradients_of(model: nn.Module, step: int) -> None:
    draws = torch.Generator().manual_seed(step)
    model.zero_grad()
    F.cross_entropy(
        model(torch.randn(16, 8, 4, 4, generator=draws)),
        torch.randint(0, 3, (16,), generator=draws),
    ).backward()


def made(model: nn.Module, **more: Any) -> Built:
    return build_optimizer(
        OptimTable.model_validate({"lr": 0.01, "weight_decay": 0.1, **STATE, **more}),
        find_trained(model),
    )


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_update_is_torchaos_own_bit_for_bit_in_whole_and_in_pieces(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torchao("this test"):
        from torchao import optim as of_torchao
    kind = of_torchao.AdamW8bit if name == "adamw" else of_torchao.Adam8bit
    for piece in (1 << 18, 1024):
        monkeypatch.setattr(eight_bits, "PIECE", piece)
        ours, theirs = network(), network()
        mine = Adam8bit(
            [ours[0].weight, ours[2].weight], lr=0.01, weight_decay=0.1, decoupled=name == "adamw"
        )
        other = kind([theirs[0].weight, theirs[2].weight], lr=0.01, weight_decay=0.1)
        for step in range(8):
            gradients_of(ours, step)
            gradients_of(theirs, step)
            mine.step()
            with torch.compiler.set_stance("force_eager"):
                other.step()
        for place in (0, 2):
            assert torch.equal(ours[place].weight, theirs[place].weight)
            state, kept = mine.state[ours[place].weight], other.state[theirs[place].weight]
            for each in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[each], kept[each].codes)
                assert torch.equal(state[f"{each}_scale"], kept[each].scale)


def test_the_state_takes_a_quarter_of_the_bytes_and_what_stays_wide_is_told() -> None:
    model = network()
    built = made(model)
    narrow, wide = built.optimizers
    guarded = GuardedUpdate(built.optimizers)
    gradients_of(model, 0)
    assert guarded.step_if_finite()[1]
    numbers = model[0].weight.numel() + model[2].weight.numel()
    kept = sum(
        each.nbytes
        for state in narrow.state.values()
        for key, each in state.items()
        if key != "step"
    )
    assert kept == 2 * numbers + 2 * 4 * numbers // 256  # 8 * numbers in fp32
    assert {id(parameter) for group in wide.param_groups for parameter in group["params"]} == {
        id(each) for each in (model[0].bias, *model[4].parameters())
    }
    assert built.summary == (
        "adamw in 8 bits: 10,240 elements, lr x 1, weight decay 0.1",
        "adamw: 576 elements, lr x 1, weight decay 0.1",
        "adamw: 35 elements, lr x 1, weight decay 0",
        "moments stay in fp32: 4.weight, 0.bias, 4.bias (fewer than 4,096 elements)",
    )
    odd = nn.Linear(4097, 1, bias=False), nn.Linear(64, 64, bias=False).double()
    assert (
        made(odd[0]).summary[-1]
        == "moments stay in fp32: weight (its size is not a multiple of 256)"
    )
    assert made(odd[1]).summary[-1] == "moments stay in fp32: weight (its dtype is torch.float64)"


def by_hand(model: nn.Module, steps: list[int], clip: float, clip_value: float | None) -> None:
    """The same optimizers, their gradients divided and clipped by torch's own functions."""
    built = made(model, lr_multipliers={"2.*": 0.5})
    for done, step in enumerate(steps):
        gradients_of(model, step)
        for parameter in model.parameters():
            parameter.grad *= 0.25  # type: ignore[operator]
        if clip_value is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        else:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
        for optimizer in built.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * group["rate"] / (1 + done)
            optimizer.step()


@pytest.mark.parametrize(("clip", "clip_value"), [(0.02, None), (0.0, 0.005)])
def test_the_guard_divides_clips_schedules_and_skips_alike_on_host_and_device(
    clip: float, clip_value: float | None
) -> None:
    expected = network()
    by_hand(expected, [1, 2, 4, 5], clip, clip_value)
    for on_device in (False, True):
        model = network()
        guarded = GuardedUpdate(
            made(model, lr_multipliers={"2.*": 0.5}).optimizers,
            clip=clip,
            clip_value=clip_value,
            curve=lambda step: 1 / (1 + step),
            total_steps=9,
            on_device=on_device,
        )
        assert guarded.on_device is on_device
        for step in range(6):
            gradients_of(model, step)
            if step in (0, 3):
                model[2].weight.grad[0, 0] = math.nan  # type: ignore[index]
            before = copy.deepcopy(
                [
                    *model.parameters(),
                    *(each for _, state in guarded.states() for each in state.values()),
                ]
            )
            assert bool(guarded.step_if_finite(0.25)[1]) is (step not in (0, 3))
            after = [
                *model.parameters(),
                *(each for _, state in guarded.states() for each in state.values()),
            ]
            if step == 3:
                assert all(
                    torch.equal(one, other) for one, other in zip(before, after, strict=True)
                )
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_plain_loop_resumes_exactly_from_a_state_dict_and_filters_may_be_channels_last() -> None:
    whole, parts = network(), network()
    last = network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    one, two, three = (
        Adam8bit([model[0].weight, model[2].weight], lr=0.01) for model in (whole, parts, last)
    )
    for step in range(6):
        for model in (whole, parts, last):
            gradients_of(model, step)
        for mine, same in zip(last.parameters(), whole.parameters(), strict=True):
            mine.grad.copy_(same.grad)  # type: ignore[union-attr, arg-type]
        if step == 3:
            saved = copy.deepcopy(two.state_dict())
            two = Adam8bit([parts[0].weight, parts[2].weight], lr=0.01)
            two.load_state_dict(saved)
        for optimizer in (one, two, three):
            optimizer.step()
    assert two.state[parts[0].weight]["exp_avg"].dtype == torch.uint8
    for model in (parts, last):
        assert all(torch.equal(model[place].weight, whole[place].weight) for place in (0, 2))


HOW: dict[str, dict[str, Any]] = {
    "accumulation": {"train": {"microbatch": 2}},
    "an average, rates and a schedule": {
        "optim": {"ema": 0.9, "lr_multipliers": {"4.*": 0.5}},
        "schedule": {"name": "linear"},
    },
    "bf16 weights": {"precision": {"compute": "bf16", "weights": "bf16"}},
    "fp16": {"precision": {"compute": "fp16", "growth_interval": 3}},
}


@pytest.mark.quick("accumulation")
@pytest.mark.parametrize("name", HOW)
def test_a_run_that_was_left_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    tables = {**HOW[name], "optim": {**HOW[name].get("optim", {}), **STATE}}
    how = spec(STEPS, checkpoint={"every": "5 steps"}, **tables)
    train(tmp_path / "whole", how, Wide())
    train(tmp_path / "left", how, Wide(), leave_at=STOP)
    train(tmp_path / "left", how, Wide())
    assert bits(tmp_path / "left") == bits(tmp_path / "whole")


def test_what_was_observed_is_recorded_and_a_contract_for_fp32_state_is_broken(
    tmp_path: Path,
) -> None:
    with Run(spec(3, optim=STATE), Wide(), folder=tmp_path / "run", quiet=True) as run:
        drive(run)
    (started,) = [each for each in records(tmp_path / "run") if isinstance(each, Started)]
    assert (
        "moments stay in fp32: 0.bias, 1.weight, 1.bias, 4.bias (fewer than 4,096 elements)"
        in started.notes
    )
    (seen,) = [each for each in records(tmp_path / "run") if isinstance(each, Dtypes)]
    states = {name: row["state"] for row in seen.parameters for name in row["names"]}
    assert states["0.weight"] == states["4.weight"] == "uint8, fp32"
    assert states["0.bias"] == "fp32"


@pytest.mark.slow
def test_digits_are_learned_as_well_as_with_moments_in_fp32(tmp_path: Path) -> None:
    scores: dict[str, list[float]] = {"8": [], "32": []}
    for seed in range(3):
        for name, tables in (("8", BITS_8), ("32", BITS_32)):
            train = {"length": "50 steps", "batch": 64, "seed": seed, "threads": 1}
            how = RunSpec(
                **tables,
                train=train,
                evaluate={"every": "50 steps"},
                observe={"tensorboard": False},
            )
            with Run(how, folder=tmp_path / f"{name}-{seed}", quiet=True) as run:
                drive(run)
            scores[name].append(run.summary["value"])
    spread = max(scores["32"]) - min(scores["32"])
    assert abs(sum(scores["8"]) - sum(scores["32"])) / 3 <= max(spread, 0.01)
    assert min(scores["8"]) > 0.9


def test_the_prediction_of_memory_knows_the_smaller_state() -> None:
    narrow, wide = (
        RunSpec(**tables, train={"threads": 1, "device": "cpu", "batch": 16})
        for tables in (BITS_8, BITS_32)
    )
    found, plain = predict(narrow), predict(wide)
    assert found.terms["optimizer"] < 0.35 * plain.terms["optimizer"]
    measured = compare(narrow, found.peak_bytes).measured_bytes
    assert found.interval[0] <= measured <= found.interval[1]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"name": "sgd"}, "not name = 'sgd'"),
        ({"name": "muon"}, "not name = 'muon'"),
        ({"name": "task"}, "not name = 'task'"),
        ({"fused": False}, "not fused = False"),
        ({"state": "4bit"}, "optim.state is '4bit'"),
    ],
)
def test_what_has_no_moments_in_8_bits_is_refused_with_what_has(
    table: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        RunSpec(optim={**STATE, **table})
    assert "adamw" in str(refused.value) or "8bit" in str(refused.value.hint)


def test_an_optimizer_of_the_task_and_an_update_in_the_backward_pass_are_refused(
    tmp_path: Path,
) -> None:
    class Own(Wide):
        def optimizer(self, groups: Any) -> torch.optim.Optimizer:
            return torch.optim.NAdam(groups)

    with pytest.raises(
        SpecError, match=r"optim\.state is given, but the task builds the optimizer"
    ):
        Run(spec(2, optim=STATE), Own(), folder=tmp_path / "a").__enter__()
    inside = {"memory": {"update_in_backward": True}, "stability": {"nonfinite": "stop"}}
    with pytest.raises(InputError, match="with this optimizer"):
        Run(
            spec(2, optim={**STATE, "clip": 0.0}, **inside), Wide(), folder=tmp_path / "b"
        ).__enter__()


class Absent:
    """Finds no torchao, wherever it may be."""

    def find_spec(self, name: str, *of_what: object) -> None:
        if name == "torchao":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_torchao_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    eight_bits.load_codes.cache_clear()
    with pytest.raises(MissingExtra, match=r'optim\.state = "8bit" needs the package torchao'):
        made(network())
    assert call(monkeypatch, "train", "digits", "--set", 'optim.state="8bit"', "--quiet") == 2
    assert "pip install 'surefoot[lowbit]'" in capsys.readouterr().err


@pytest.mark.slow  # imports torchao in a process of its own
def test_torchao_is_loaded_by_whom_asks_for_it_alone_and_says_nothing() -> None:
    program = (
        "import sys; from surefoot.cli.main import main\ntry: main()\n"
        "finally: sys.stderr.write(f\"{'torchao' in sys.modules}\")"
    )
    for words, is_loaded in (((), False), (("--set", 'optim.state="8bit"'), True)):
        line = [
            sys.executable,
            "-c",
            program,
            "explain",
            "digits",
            "--json",
            "--set",
            "train.batch=4",
            *words,
        ]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.stderr == str(is_loaded)


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.ones(65, 64), "65 x 64 has no 8-bit state: its size is not a multiple of 256"),
        (torch.ones(8), "fewer than 4,096 elements"),
        (torch.ones(64, 64, dtype=torch.complex64), "its dtype is torch.complex64"),
    ],
)
def test_a_parameter_that_does_not_fit_is_refused_by_the_optimizer(
    weight: torch.Tensor, reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        Adam8bit([torch.nn.Parameter(weight)])
