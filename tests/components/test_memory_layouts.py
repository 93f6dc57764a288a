"""Tests of updates of parameters that lie oddly in memory.

The same numbers as for a contiguous copy, whatever kernel takes the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.optim.build import build as build_optimizer
from surefoot.components.optim.groups import find_trained
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.spec import OptimTable
from surefoot.core.errors import TaskError

STEPS = 4
TABLES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adam": {"name": "adam"},
    "sgd": {"name": "sgd", "momentum": 0.9},
    "plain sgd": {"name": "sgd"},
    "lars": {"name": "lars", "lr": 1.0},
    "lamb": {"name": "lamb"},
    "muon": {"name": "muon"},
    "not fused": {"name": "adamw", "fused": False},
}
# the same numbers of shape (4, 3, 2, 2), otherwise in memory
PLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice of columns": lambda given: _inside(given, (4, 3, 2, 5))[..., 1:3],
    "a slice of rows": lambda given: _inside(given, (4, 3, 2, 2), offset=7),
    "every second": lambda given: _inside(given, (4, 3, 2, 4))[..., ::2],
    "transposed": lambda given: given.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": lambda given: given.contiguous(memory_format=torch.channels_last),
    "channels last in a slice": lambda given: _inside(given.movedim(1, -1), (4, 2, 2, 6))[
        ..., :3
    ].movedim(-1, 1),
}


def _inside(given: Tensor, shape: tuple[int, ...], offset: int = 0) -> Tensor:
    """Room of `shape` whose beginning, or whose every second number, holds what was given."""
    return torch.full((offset + int(torch.tensor(shape).prod()),), 9.0)[offset:].view(shape)


def placed(kind: str, given: Tensor) -> Tensor:
    made = PLACED[kind](given.clone())
    if made.shape == given.shape and not torch.equal(made, given):
        made.copy_(given)
    assert torch.equal(made, given)
    return made


def train(
    parameter: nn.Parameter,
    table: dict[str, Any],
    gradient: Callable[[Tensor], Tensor] = lambda given: given,
) -> Tensor:
    model = nn.Module()
    model.first, model.odd = nn.Linear(3, 3), parameter
    with torch.no_grad():
        for each in model.first.parameters():
            each.fill_(0.5)
    built = build_optimizer(
        OptimTable.model_validate({"lr": 0.05, "weight_decay": 0.01, **table}),
        find_trained(model),
    )
    guarded = GuardedUpdate(built.optimizers, clip=5.0)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        for each in model.parameters():
            each.grad = gradient(torch.randn(each.shape, generator=draw))
        guarded.step_if_finite(0.5)
    return parameter.detach().clone()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", PLACED)
def test_a_parameter_is_trained_alike_wherever_its_numbers_lie(kind: str, name: str) -> None:
    given = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(9))
    odd = nn.Parameter(placed(kind, given))
    torch.testing.assert_close(
        train(odd, TABLES[name]),
        train(nn.Parameter(given.clone()), TABLES[name]),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("name", TABLES)
def test_a_gradient_may_lie_otherwise_than_its_weight(name: str) -> None:
    given = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(9))

    def channels_last(gradient: Tensor) -> Tensor:
        return (
            gradient.contiguous(memory_format=torch.channels_last)
            if gradient.ndim == 4
            else gradient
        )

    theirs = train(nn.Parameter(given.clone()), TABLES[name], channels_last)
    torch.testing.assert_close(
        theirs, train(nn.Parameter(given.clone()), TABLES[name]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 1, 3)])
def test_a_parameter_whose_elements_share_memory_is_refused_as_torch_refuses_it(
    shape: tuple[int, ...],
) -> None:
    expanded = nn.Parameter(torch.ones(1).expand(shape))
    expanded.grad = torch.ones(shape)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.optim.SGD([expanded], lr=0.1, fused=False).step()
    model = nn.Module()
    model.wide = expanded
    with pytest.raises(TaskError, match="the parameter wide is expanded"):
        find_trained(model)
    model.wide = nn.Parameter(expanded.detach().clone())  # as the hint says
    assert [each.name for each in find_trained(model)] == ["wide"]


def test_what_lies_beside_a_slice_stays_as_it_is() -> None:
    room = torch.full((4, 3, 2, 5), 9.0)
    odd = nn.Parameter(room[..., 1:3])
    train(odd, TABLES["adamw"])
    assert bool((room[..., 0] == 9).all())
    assert bool((room[..., 3:] == 9).all())
    assert not bool((room[..., 1:3] == 9).any())
