"""An update follows its optimizers.

What their owner loads, adds or sets after it was built counts as in a loop of plain PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from surefoot.components.optim.in_backward import UpdateInBackward
from surefoot.components.optim.kinds.layerwise import Lamb, Lars
from surefoot.components.optim.update import GuardedUpdate
from surefoot.core.errors import SpecError
from tests.components.test_optim import gradients_of, network

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "lars": lambda params: Lars(params, lr=0.5),
    "lamb": lambda params: Lamb(params, lr=0.02),
}
each_maker = pytest.mark.parametrize("name", MAKERS)


def step(model: nn.Module, number: int, update: GuardedUpdate | Optimizer) -> None:
    gradients_of(model, number)
    update.step_if_finite() if isinstance(update, GuardedUpdate) else update.step()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def trained(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model = network()
    optimizer = MAKERS[name](model.parameters())
    for number in range(5):
        step(model, number, optimizer)
    return model, copy.deepcopy(optimizer.state_dict())


@each_maker
@pytest.mark.parametrize("has_curve", [False, True])
def test_a_state_that_is_loaded_after_the_update_was_built_is_used(
    name: str, has_curve: bool
) -> None:
    ours, saved = trained(name)
    theirs = copy.deepcopy(ours)
    optimizer, plain = MAKERS[name](ours.parameters()), MAKERS[name](theirs.parameters())
    update = GuardedUpdate([optimizer], curve=(lambda done: 1.0) if has_curve else None)
    optimizer.load_state_dict(copy.deepcopy(saved))
    plain.load_state_dict(copy.deepcopy(saved))
    for number in range(5, 8):
        step(ours, number, update)
        step(theirs, number, plain)
    assert_same(ours, theirs)
    held = [
        each for state in optimizer.state.values() for key, each in state.items() if key != "step"
    ]
    for one, other in zip(
        held, (e for s in plain.state.values() for k, e in s.items() if k != "step"), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@each_maker
def test_a_state_that_is_loaded_between_two_steps_is_used(name: str) -> None:
    ours, saved = trained(name)
    theirs = copy.deepcopy(ours)
    optimizer, plain = MAKERS[name](ours.parameters()), MAKERS[name](theirs.parameters())
    update = GuardedUpdate([optimizer])
    for number in range(4):
        if number == 2:
            optimizer.load_state_dict(copy.deepcopy(saved))
            plain.load_state_dict(copy.deepcopy(saved))
        step(ours, number, update)
        step(theirs, number, plain)
    assert_same(ours, theirs)


@each_maker
def test_a_group_that_is_added_is_trained_and_its_gradients_are_cleared(name: str) -> None:
    ours, theirs = network(), network()
    optimizer, plain = MAKERS[name](ours[:4].parameters()), MAKERS[name](theirs[:4].parameters())
    update = GuardedUpdate([optimizer])
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": list(ours[4:].parameters()), "lr": 0.05})
            plain.add_param_group({"params": list(theirs[4:].parameters()), "lr": 0.05})
        step(ours, number, update)
        step(theirs, number, plain)
    assert_same(ours, theirs)
    update.clear_gradients()
    assert all(each.grad is None for each in ours.parameters())


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda given: schedulers.LambdaLR(given, lambda done: 1 / (1 + done)),
    "StepLR": lambda given: schedulers.StepLR(given, 2, gamma=0.3),
    "OneCycleLR": lambda given: schedulers.OneCycleLR(
        given, 0.02, total_steps=8, cycle_momentum=False
    ),
    "CosineAnnealingLR": lambda given: schedulers.CosineAnnealingLR(given, 6),
    "a warm-up, then": lambda given: schedulers.SequentialLR(
        given,
        [schedulers.LinearLR(given, 0.1, total_iters=2), schedulers.ExponentialLR(given, 0.5)],
        [2],
    ),
}


@each_maker
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("is_first", [True, False], ids=["made before the update", "made after it"])
def test_a_learning_rate_that_a_scheduler_of_torch_sets_is_used(
    name: str, schedule: str, is_first: bool
) -> None:
    ours, theirs = network(), network()
    optimizer, plain = MAKERS[name](ours.parameters()), MAKERS[name](theirs.parameters())
    early = SCHEDULERS[schedule](optimizer) if is_first else None
    update = GuardedUpdate([optimizer])
    both = [early or SCHEDULERS[schedule](optimizer), SCHEDULERS[schedule](plain)]
    for number in range(6):
        step(ours, number, update)
        step(theirs, number, plain)
        for each in both:
            each.step()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert_same(ours, theirs)


@pytest.mark.parametrize("of_groups", [{}, {"rate": 0.5}])
def test_two_that_decide_a_learning_rate_are_refused(of_groups: dict[str, Any]) -> None:
    model = network()
    optimizer = torch.optim.SGD(
        [{"params": list(model.parameters()), **of_groups}], lr=0.1, fused=True
    )
    update = GuardedUpdate([optimizer], curve=None if of_groups else lambda done: 1.0)
    step(model, 0, update)
    optimizer.param_groups[0]["lr"] *= 0.1
    with pytest.raises(SpecError, match="was set to") as refused:
        step(model, 1, update)
    assert "without curve" in refused.value.hint


@each_maker
def test_a_multiplier_of_a_group_stays_when_a_state_is_loaded(name: str) -> None:
    ours, theirs = network(), network()
    optimizer = MAKERS[name]([{"params": list(ours.parameters()), "rate": 0.5}])
    update = GuardedUpdate([optimizer])
    plain = MAKERS[name](theirs.parameters())
    plain.param_groups[0]["lr"] *= 0.5
    for number in range(4):
        if number == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            plain.load_state_dict(copy.deepcopy(plain.state_dict()))
        step(ours, number, update)
        step(theirs, number, plain)
    assert_same(ours, theirs)


def test_an_update_inside_the_backward_pass_moves_a_group_that_is_added() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model[:4].parameters(), fused=True)
    inside = UpdateInBackward(GuardedUpdate([optimizer]))
    optimizer.add_param_group({"params": list(model[4:].parameters())})
    before = model[6].weight.detach().clone()
    inside.step(lambda: model(torch.randn(4, 1, 8, 8)).square().sum().backward())
    assert not torch.equal(before, model[6].weight)
    assert all(each.grad is None for each in model.parameters())


def test_a_tensor_of_the_state_that_is_replaced_is_used() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    update = GuardedUpdate([optimizer])
    step(model, 0, update)
    weight = model[6].weight
    optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, 5.0)
    before = weight.detach().clone()
    step(model, 1, update)
    assert weight.grad is not None
    torch.testing.assert_close(before - weight.detach(), 0.1 * (0.9 * 5.0 + weight.grad))
