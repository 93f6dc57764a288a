"""Each of our optimizers as an ordinary torch optimizer.

What a loop of one's own does with torch's works with ours.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from surefoot.components.optim.kinds.by_group import ByGroup
from surefoot.components.optim.kinds.eight_bits import Adam8bit
from surefoot.components.optim.kinds.layerwise import Lamb, Lars
from surefoot.components.optim.kinds.muon import FlatMuon
from surefoot.components.optim.update import GuardedUpdate
from surefoot.core.errors import SpecError

STEPS = 4
KINDS: dict[str, Callable[..., Optimizer]] = {
    "muon": lambda params: FlatMuon(params, lr=0.05, momentum=0.9, nesterov=True),
    "lars": lambda params: Lars(params, lr=0.5, momentum=0.9, trust_coefficient=0.02),
    "lars, not fused": lambda params: Lars(params, lr=0.5, fused=False),
    "lamb": lambda params: Lamb(params, lr=0.02),
    "lamb, not fused": lambda params: Lamb(params, lr=0.02, fused=False),
    "8-bit adamw": lambda params: Adam8bit(params, lr=0.02),
    "8-bit adam": lambda params: Adam8bit(params, lr=0.02, decoupled=False),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def weights(seed: int = 0) -> list[nn.Parameter]:
    """A matrix and a filter, both of whole blocks of 8-bit state."""
    draws = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=draws)) for shape in ((64, 64), (64, 16, 2, 2))
    ]


def loss_of(params: list[nn.Parameter], step: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(100 + step)
    return torch.stack(
        [((each - torch.randn(each.shape, generator=draws)) ** 2).mean() for each in params]
    ).sum()


def train(
    optimizer: Optimizer, params: list[nn.Parameter], steps: range = range(STEPS)
) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        loss_of(params, step).backward()
        optimizer.step()
    return [each.detach().clone() for each in params]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@each_kind
def test_a_step_moves_every_parameter_and_lowers_the_loss(kind: str) -> None:
    params = weights()
    before, loss = [each.detach().clone() for each in params], loss_of(params).item()
    after = train(KINDS[kind](params), params)
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert loss_of(params).item() < loss


@each_kind
def test_zero_grad_clears_the_gradients_of_the_parameters(kind: str) -> None:
    params = weights()
    optimizer = KINDS[kind](params)
    loss_of(params).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(each.grad is not None and not each.grad.any() for each in params)
    optimizer.zero_grad()
    assert all(each.grad is None for each in params)


@each_kind
def test_the_groups_hold_the_parameters_themselves(kind: str) -> None:
    params = weights()
    held = [each for group in KINDS[kind](params).param_groups for each in group["params"]]
    assert all(one is other for one, other in zip(held, params, strict=True))


@each_kind
def test_a_closure_is_called_once_a_step_with_gradients_on(kind: str) -> None:
    params, other, calls = weights(), weights(), []
    optimizer, plain = KINDS[kind](params), KINDS[kind](other)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(params, step)
            loss.backward()
            calls.append(step)
            return loss

        returned = optimizer.step(closure)  # type: ignore[arg-type]
        assert torch.is_tensor(returned)
        train(plain, other, range(step, step + 1))
    assert calls == list(range(STEPS))
    assert equal([*params], [*other])


@each_kind
def test_a_state_dict_that_was_saved_and_loaded_continues_with_the_same_bits(kind: str) -> None:
    whole, first = weights(), weights()
    expected = train(KINDS[kind](whole), whole, range(2 * STEPS))
    optimizer = KINDS[kind](first)
    train(optimizer, first)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second = [nn.Parameter(each.detach().clone()) for each in first]
    resumed = KINDS[kind](second)
    resumed.load_state_dict(torch.load(file))
    assert equal(train(resumed, second, range(STEPS, 2 * STEPS)), expected)


@each_kind
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_with_its_parameters_continues_with_the_same_bits(
    kind: str, copied: Callable[[Any], Any]
) -> None:
    params = weights()
    optimizer = KINDS[kind](params)
    train(optimizer, params)
    other, others = copied((optimizer, params))
    assert equal(
        train(other, others, range(STEPS, 2 * STEPS)),
        train(optimizer, params, range(STEPS, 2 * STEPS)),
    )


@each_kind
def test_schedulers_of_torch_set_the_learning_rate(kind: str) -> None:
    params = weights()
    optimizer = KINDS[kind](params)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 1 else 0.0)
    moved = []
    for step in range(3):
        before = params[1].detach().clone()
        loss_of(params, step).backward()
        optimizer.step()
        schedule.step()
        moved.append(not torch.equal(before, params[1]))
    assert moved[0]
    # whose momentum holds the learning rates of earlier steps
    assert not moved[2] or "lars" in kind
    assert [group["lr"] for group in optimizer.param_groups] == [0.0]


@each_kind
def test_hooks_run_once_a_step(kind: str) -> None:
    # torch wraps the step of a class when the first optimizer of it is made
    torch.optim.Muon([torch.zeros(2, 2)])
    params, seen = weights(), []
    optimizer = KINDS[kind](params)
    optimizer.register_step_pre_hook(lambda *given: seen.append("before"))
    optimizer.register_step_post_hook(lambda *given: seen.append("after"))
    everywhere = register_optimizer_step_pre_hook(lambda *given: seen.append("any"))
    try:
        train(optimizer, params, range(2))
    finally:
        everywhere.remove()
    assert seen == ["any", "before", "after"] * 2 or seen == ["before", "any", "after"] * 2


@each_kind
def test_a_grad_scaler_divides_the_gradients_and_skips_what_is_not_finite(kind: str) -> None:
    params, other = weights(), weights()
    optimizer = KINDS[kind](params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(params, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    for one, two in zip(params, train(KINDS[kind](other), other), strict=True):
        torch.testing.assert_close(one.detach(), two)
    before = [each.detach().clone() for each in params]
    scaler.scale(loss_of(params) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert equal(before, [*params])
    assert scaler.get_scale() == 512.0


@each_kind
def test_a_group_that_is_added_is_trained_as_one_of_the_start(kind: str) -> None:
    params, others = weights(), weights()
    optimizer = KINDS[kind](params[:1])
    optimizer.add_param_group({"params": params[1:]})
    whole = KINDS[kind]([{"params": others[:1]}, {"params": others[1:]}])
    assert [*optimizer.param_groups[1]] == [*whole.param_groups[1]]
    assert optimizer.param_groups[1].get("fused") == whole.param_groups[1].get("fused")
    assert equal(train(optimizer, params), train(whole, others))


@each_kind
def test_named_parameters_are_taken(kind: str) -> None:
    params, others = weights(), weights()
    optimizer = KINDS[kind](iter([("first", params[0]), ("second", params[1])]))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["first", "second"]
    assert equal(train(optimizer, params), train(KINDS[kind](others), others))


@each_kind
def test_a_parameter_without_a_gradient_stays_as_it_is(kind: str) -> None:
    params = weights()
    before = params[0].detach().clone()
    optimizer = KINDS[kind](params)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(params[1:], step).backward()
        optimizer.step()
    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state or not optimizer.state[params[0]].get("step", 0)


@each_kind
def test_no_parameters_at_all_are_refused_as_torch_refuses_them(kind: str) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        KINDS[kind]([])


def test_a_momentum_buffer_of_a_matrix_in_an_earlier_state_is_used() -> None:
    """Of a filter the buffer has the shape of the matrix, as it always had in checkpoints."""
    params = weights()
    optimizer = KINDS["muon"](params)
    train(optimizer, params)
    assert [tuple(optimizer.state[each]["momentum_buffer"].shape) for each in params] == [
        (64, 64),
        (64, 64),
    ]


@pytest.mark.parametrize("shape", [(4096,), ()])
def test_muon_refuses_what_is_no_matrix_and_keeps_its_groups(shape: tuple[int, ...]) -> None:
    optimizer = KINDS["muon"](weights())
    with pytest.raises(SpecError, match="matrices and filters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(shape))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("shape", [(4096 + 1,), (8,)])
def test_a_group_that_is_added_to_8_bit_adam_is_checked_as_one_of_the_start(
    shape: tuple[int, ...],
) -> None:
    optimizer = KINDS["8-bit adam"](weights())
    with pytest.raises(SpecError, match="no 8-bit state"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(shape))]})
    assert len(optimizer.param_groups) == 1


class Signs(ByGroup):
    """An optimizer of one's own that says what a graph would have to hold of it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(
            params,
            {"lr": lr, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "fused": True},
        )

    def create_state(self, group: dict[str, Any]) -> None:
        pass

    def traced(self, group: dict[str, Any]) -> Any:
        return list(group["params"]), [], [], [], []

    def _move(
        self,
        group: dict[str, Any],
        params: Any,
        grads: Any,
        lr: Any,
        grad_scale: Any,
        found_inf: Any,
    ) -> None:
        for parameter, grad in zip(params, grads, strict=True):
            parameter.sub_(grad.sign(), alpha=lr)


@pytest.mark.parametrize("name", ["Signs", "Lamb", "SGD", "AdamW"])
def test_an_optimizer_whose_rule_no_graph_knows_is_refused_whatever_its_name(name: str) -> None:
    """It would be trained by the rule of another one."""
    update = GuardedUpdate([type(name, (Signs,), {})(weights())])
    with pytest.raises(SpecError, match=f"an optimizer is {name}"):
        update.check_traceable()


@pytest.mark.parametrize("kind", [Lars, Lamb, torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_the_rules_that_a_graph_knows_are_taken(kind: Any) -> None:
    GuardedUpdate([kind(weights(), lr=0.1, fused=True)]).check_traceable()
