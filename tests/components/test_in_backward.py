"""Tests of the update inside the backward pass.

The same bits, without all gradients at once, and refused where all are needed.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot import Run, RunSpec
from surefoot.components.optim.in_backward import UpdateInBackward
from surefoot.components.optim.update import GuardedUpdate
from surefoot.core.errors import InputError, NumbersError, SpecError
from tests.train import small

TABLES = {"memory": {"update_in_backward": True}, "stability": {"nonfinite": "stop"}}


def tables(**optim: Any) -> dict[str, Any]:
    return {**TABLES, "optim": {"clip": 0.0, **optim}}


@pytest.mark.quick("optimizer0", "optimizer2")
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "adamw"},
        {"name": "adam", "weight_decay": 0.1},
        {"name": "sgd"},
        {"name": "sgd", "momentum": 0.0},
    ],
)
def test_a_run_trains_to_the_same_bits_and_goes_on_to_them(
    optimizer: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for name, stops in (("plain", ()), ("inside", ()), ("resumed", (5,))):
        memory = {"update_in_backward": name != "plain"}
        spec = small.spec(
            12, **{**tables(**optimizer), "memory": memory, "schedule": {"name": "linear"}}
        )
        for length in (*stops, 12):
            with Run(
                spec, small.Small(dropout=0.2, norm=True), folder=tmp_path / name, quiet=True
            ) as run:
                losses = [report.loss for report in islice(run.steps(), length - run.step)]
                assert run.step == length
        found.append(
            [
                torch.tensor(losses[-5:]),
                *(each.detach().clone() for each in run.model.state_dict().values()),
            ]
        )
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_each_gradient_is_gone_before_the_next_one_comes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    guarded = GuardedUpdate([torch.optim.AdamW(model.parameters(), fused=True)])
    inside = UpdateInBackward(guarded)
    living: list[int] = []

    def watch(parameter: Tensor) -> None:
        living.append(sum(each.grad is not None for each in model.parameters()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(watch)  # called before that of the update
    norm = inside.step(lambda: model(torch.randn(4, 8)).square().sum().backward())
    assert norm > 0
    assert living == [1] * 6
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.randn(4, 8)).sum().backward()  # outside a step gradients are gathered as ever
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_gradient_that_is_not_finite_ends_the_run_and_its_parameter_stays(tmp_path: Path) -> None:
    spec = small.spec(12, **tables())
    with (
        pytest.raises(
            NumbersError, match=r"step 4: a gradient is non-finite.*already updated some parameters"
        ) as raised,
        Run(
            spec, small.Odd("finite loss, inf gradient"), folder=tmp_path / "run", quiet=True
        ) as run,
    ):
        for _ in run.steps():
            before = {name: each.detach().clone() for name, each in run.model.named_parameters()}
    assert "surefoot resume" in str(raised.value.hint)
    # here none was finite
    assert all(torch.equal(each, before[name]) for name, each in run.model.named_parameters())


def test_a_loss_that_is_not_finite_moves_nothing_and_ends_the_run(tmp_path: Path) -> None:
    with (
        pytest.raises(NumbersError, match="the loss is nan"),
        Run(
            small.spec(12, **tables()),
            small.Odd("nan loss, finite gradient"),
            folder=tmp_path / "run",
            quiet=True,
        ) as run,
    ):
        for report in run.steps():
            if report.step == 3:
                before = [each.detach().clone() for each in run.model.state_dict().values()]
    assert all(map(torch.equal, run.model.state_dict().values(), before))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"train": {"microbatch": 2, "batch": 4}},
            "the gradients of several microbatches are summed first",
        ),
        ({"optim": {}}, r"optim\.clip = 1 \(the default\) needs the norm"),
        ({"optim": {"clip": 0.0, "clip_value": 1.0}}, "clip_value clips all"),
        ({"optim": {"clip": 0.0, "name": "muon"}}, "'muon' updates all parameters at once"),
        ({"optim": {"clip": 0.0, "name": "lamb"}}, "'lamb' updates all parameters at once"),
        ({"optim": {"clip": 0.0, "fused": False}}, "already uses a fused kernel"),
        ({"stability": {}}, "partly applied step cannot be skipped"),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused_with_the_reason(
    changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=says) as raised:
        RunSpec(**{**tables(), **changed})
    assert raised.value.hint


def test_scaled_gradients_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(SpecError, match="does not support fp16"),
        Run(
            small.spec(2, **tables(), precision={"compute": "fp16"}),
            small.Small(),
            folder=tmp_path / "run",
            quiet=True,
        ),
    ):
        pass


def test_an_optimizer_of_the_task_and_several_updates_are_refused(tmp_path: Path) -> None:
    class Own(small.Small):
        def optimizer(self, groups: Any) -> torch.optim.Optimizer:
            return torch.optim.NAdam(groups)

    with (
        pytest.raises(InputError, match="with this optimizer"),
        Run(
            small.spec(2, **{**TABLES, "optim": {"clip": 0.0}}),
            Own(),
            folder=tmp_path / "run",
            quiet=True,
        ),
    ):
        pass


def test_the_schedule_goes_on_after_a_save_where_the_device_is_not_waited_for() -> None:
    model = nn.Linear(2, 2)
    guarded = GuardedUpdate(
        [torch.optim.SGD(model.parameters(), lr=1.0, fused=True)],
        curve=lambda step: 1.0 / (1 + step),
        total_steps=10,
        on_device=True,
    )
    inside = UpdateInBackward(guarded)
    rates = []
    for _ in range(4):
        inside.step(lambda: model(torch.ones(1, 2)).sum().backward())
        rates.append(float(guarded.groups[0]["lr"]))
        assert guarded.state({})["applied_steps"] == len(rates)
    assert rates == pytest.approx([1.0, 1 / 2, 1 / 3, 1 / 4])
