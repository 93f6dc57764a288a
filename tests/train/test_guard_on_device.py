"""What the guard decides on an asynchronous device, forced on a CPU.

The numbers of deciding on the host, and no wait.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.data.blocks import Order
from surefoot.components.data.feed import Feed
from surefoot.components.optim import saving
from surefoot.components.optim.average import WeightAverage
from surefoot.components.optim.build import build as build_optimizer
from surefoot.components.optim.groups import find_trained
from surefoot.components.optim.kinds.muon import FlatMuon
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.spec import RunSpec
from surefoot.contract.state import StepReport
from surefoot.contract.task import resolve
from surefoot.core.errors import SpecError
from surefoot.train.step import LiveUpdate, make_parts
from tests.train.small import BATCH, OPTIMIZERS, SAMPLES, Odd, Small


def curve(step: int) -> float:
    return 0.5 ** (step / 4)


def worked(
    name: str, on_device: bool, *, clip: float, clip_value: float | None, bad: tuple[int, ...]
) -> tuple[list[Tensor], list[Any], int]:
    """Twelve updates by one way, with gradients that are not finite at the steps `bad`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    table = RunSpec(
        optim={**OPTIMIZERS[name], "lr": 0.05, "clip": 0.0, "lr_multipliers": {"3.*": 0.5}}
    ).optim
    built = build_optimizer(table, find_trained(model))
    guarded = GuardedUpdate(
        built.optimizers,
        clip=clip,
        clip_value=clip_value,
        curve=curve,
        total_steps=12,
        on_device=on_device,
    )
    assert guarded.on_device is on_device
    told = []
    for step in range(12):
        guarded.clear_gradients()
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(inputs), torch.arange(6) % 3, reduction="sum").backward()
        if step in bad:
            guarded.parameters[0].grad[0] = math.inf  # type: ignore[index]
        norm, applied = guarded.step_if_finite(torch.tensor(1 / 6) if on_device else 1 / 6)
        assert isinstance(applied, Tensor) is on_device
        told.append(
            (
                float(norm),
                bool(applied),
                [float(group["lr"]) for group in guarded.groups] if applied else [],
            )
        )
    rates = guarded.rates
    assert rates == [
        0.05 * group.get("rate", 1.0) * curve(12 - len(bad)) for group in guarded.groups
    ]
    return (
        [tensor.detach().clone() for tensor in model.state_dict().values()],
        told,
        guarded.applied_steps,
    )


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "plain sgd"])
@pytest.mark.parametrize(("clip", "clip_value"), [(0.0, None), (0.3, None), (0.0, 0.02)])
@pytest.mark.parametrize("bad", [(), (0, 5, 6)])
def test_deciding_on_the_device_gives_the_weights_of_deciding_on_the_host(
    name: str, clip: float, clip_value: float | None, bad: tuple[int, ...]
) -> None:
    host, told, applied = worked(name, False, clip=clip, clip_value=clip_value, bad=bad)
    device, told_too, applied_too = worked(name, True, clip=clip, clip_value=clip_value, bad=bad)
    assert applied == applied_too == 12 - len(bad)
    for one, other in zip(host, device, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)
    for (norm, was_applied, rates), (norm_too, was_applied_too, rates_too) in zip(
        told, told_too, strict=True
    ):
        assert norm == pytest.approx(norm_too, rel=1e-5, nan_ok=True)
        assert was_applied is was_applied_too
        assert rates == pytest.approx(rates_too, rel=1e-6)  # what a report shows is what was used


def stepped(
    on_device: bool, task: Small, steps: int = 10
) -> tuple[dict[str, Tensor], list[StepReport], WeightAverage]:
    """A whole step loop by one way: feed, loss, guard, buffers, average."""
    torch.manual_seed(0)
    model = task.model()
    feed = Feed(task.data("train"), Order(SAMPLES, 0), batch=BATCH)
    resolved = resolve(task)
    # not Adam: it blows up the gradient of a bias before BatchNorm, which is rounding alone
    built = build_optimizer(RunSpec(optim={"name": "sgd", "lr": 0.05}).optim, find_trained(model))
    guarded = GuardedUpdate(
        built.optimizers, clip=1.0, curve=curve, total_steps=steps, on_device=on_device
    )
    average = WeightAverage(list(model.parameters()), 0.9)
    update = LiveUpdate(
        "loss", lambda model, batch: task.loss(task.forward(model, batch), batch), guarded
    )
    parts = make_parts(
        model=model,
        task=resolved,
        feed=feed,
        updates=[update],
        seed=0,
        device=torch.device("cpu"),
    )
    parts.observers.published.append(lambda done: average.update(done.was_applied))
    step = parts.step_function()
    reports = [step(number) for number in range(1, steps + 1)]
    return (
        {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        reports,
        average,
    )


@pytest.mark.parametrize(
    "how",
    ["none", "inf loss, finite gradient", "nan loss, finite gradient", "finite loss, inf gradient"],
)
def test_a_step_decided_on_the_device_equals_one_decided_on_the_host(how: str) -> None:
    host, told, average = stepped(False, Odd(how, 2))
    device, told_too, average_too = stepped(True, Odd(how, 2))
    for name, tensor in host.items():
        torch.testing.assert_close(
            tensor,
            device[name],
            rtol=1e-5,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert [report.applied for report in told] == [report.applied for report in told_too]
    assert [report.applied for report in told].count(False) == (0 if how == "none" else 2)
    assert average.num_updates == average_too.num_updates == (10 if how == "none" else 8)
    for one, other in zip(average.averages, average_too.averages, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for one_report, other_report in zip(told, told_too, strict=True):
        if one_report.applied:
            assert float(one_report.learning_rate) == pytest.approx(
                float(other_report.learning_rate), rel=1e-6
            )


def test_nothing_of_a_step_decided_on_the_device_is_read_before_the_report_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Tensor) -> Any:
        raise AssertionError("the host waited for the device")

    for name in ("item", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, refuse)
    _, reports, _ = stepped(True, Small(norm=True), steps=4)
    monkeypatch.undo()
    assert all(report.applied for report in reports)


def test_a_schedule_that_is_not_finite_is_refused_where_it_is_read_beforehand() -> None:
    model = nn.Linear(2, 2)
    made = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with pytest.raises(SpecError, match="after 3 updates"):
        GuardedUpdate(
            [made], curve=lambda step: math.inf if step == 3 else 1.0, total_steps=5, on_device=True
        )


@pytest.mark.parametrize("added", ["adamw", "muon"])
def test_an_optimizer_that_is_added_later_updates_on_the_device_or_the_host_decides(
    added: str,
) -> None:
    """FlatMuon has no update that decides on the device."""
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), []
    for on_device in (True, False):
        own = copy.deepcopy(model)
        first = torch.optim.AdamW(own[1].parameters(), lr=0.1, fused=True)
        guarded = GuardedUpdate([first], curve=curve, total_steps=6, on_device=on_device)
        weights = [own[0].weight]
        for step in range(6):
            if step == 2:
                late = (
                    torch.optim.AdamW(weights, lr=0.1, fused=True)
                    if added == "adamw"
                    else FlatMuon(weights, lr=0.1)
                )
                guarded.extend([late])
                assert guarded.on_device is (on_device and added == "adamw")
            guarded.clear_gradients()
            own(torch.ones(2, 3)).square().sum().backward()
            guarded.step_if_finite(torch.tensor(0.5) if guarded.on_device else 0.5)
            assert guarded.applied_steps == step + 1
        found.append((list(own.parameters()), guarded.rates))
    torch.testing.assert_close(found[0], found[1])
    assert not torch.equal(found[0][0][0], model[0].weight)  # type: ignore[arg-type]


COUNTED = {"Adam": {}, "NAdam": {}, "Adam with its counter there": {"capturable": True}}


@pytest.mark.parametrize("kind", COUNTED)
def test_a_restored_state_is_on_the_device_where_the_optimizer_keeps_it(kind: str) -> None:
    """Also that of a parameter of no dimension, as CLIP's temperature, as torch loads it."""
    make = {"NAdam": torch.optim.NAdam}.get(kind, torch.optim.Adam)

    def made(device: str) -> tuple[list[Tensor], torch.optim.Optimizer]:
        weights: list[Tensor] = [
            nn.Parameter(torch.ones(shape, device=device)) for shape in ((), (2, 3))
        ]
        return weights, make(weights, lr=0.1, **COUNTED[kind])

    weights, trained = made("cpu")
    trained.param_groups[0]["capturable"] = False
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    trained.step()
    saved = saving.state_of(trained, weights, {})
    weights, restored = made("meta")
    saving.restore(restored, {**saved, "groups": None}, weights, {})
    theirs = made("meta")[1]
    there = trained.state_dict()
    there["param_groups"] = theirs.state_dict()["param_groups"]
    theirs.load_state_dict(there)
    for ours, other in zip(restored.state.values(), theirs.state.values(), strict=True):
        assert {key: each.device for key, each in ours.items()} == {
            key: each.device for key, each in other.items()
        }
