"""What a user attached to a BatchNorm stays when the norm is converted."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from surefoot.components.parallel.sync_norm import SyncNorm, join_batchnorm
from surefoot.components.stability.norms import convert_batchnorm
from surefoot.core.errors import TaskError

WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "group": lambda model: convert_batchnorm(model, "group"),
    "layer": lambda model: convert_batchnorm(model, "layer"),
    "sync": join_batchnorm,
}


def small_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())


def images() -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def before(norm: Any) -> None:
    norm.register_forward_pre_hook(lambda module, given: (given[0] * 2,))


def after(norm: Any) -> None:
    norm.register_forward_hook(lambda module, given, output: output + 3)


def of_gradient(norm: Any) -> None:
    norm.register_full_backward_hook(
        lambda module, into, out: tuple(None if each is None else each * 5 for each in into)
    )


def of_weight(norm: Any) -> None:
    norm.weight.register_hook(lambda gradient: gradient * 7)


HOOKS = (before, after, of_gradient, of_weight)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_a_norm_is_called_after_the_norm_was_converted(hook: Any, way: str) -> None:
    first, second = small_model(), small_model()
    hook(first[1])
    WAYS[way](first)
    WAYS[way](second)
    hook(second[1])  # added to the converted norm
    found, expected = [], []
    for model, into in ((first, found), (second, expected)):
        output = model(images())
        output.square().sum().backward()
        into += [output, *(each.grad for each in model.parameters())]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("way", WAYS)
def test_attributes_buffers_and_handles_of_a_norm_stay(way: str) -> None:
    model, seen = small_model(), list[str]()
    norm = model[1]
    norm.level = 3
    norm.register_buffer("mine", torch.ones(2))
    norm.weight.no_decay = True
    handle = norm.register_forward_hook(lambda *_: seen.append("called"))
    tied = nn.ModuleList([model, norm]).eval()
    WAYS[way](tied)
    assert model[1] is norm is tied[1]
    assert type(norm) in (nn.GroupNorm, SyncNorm)
    assert (norm.level, norm.weight.no_decay, norm.training) == (3, True, False)
    kept = {"weight", "bias", "mine"}
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    assert set(norm.state_dict()) == kept | (statistics if way == "sync" else set())
    handle.remove()
    model(images())
    assert not seen


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
def test_a_converted_norm_computes_as_a_group_norm_that_is_built(
    affine: bool, tracks: bool
) -> None:
    model = nn.Sequential(nn.BatchNorm2d(16, eps=1e-3, affine=affine, track_running_stats=tracks))
    assert convert_batchnorm(model, "group") == ["0"]
    x = torch.randn(4, 16, 3, 3)
    assert torch.equal(model(x), nn.GroupNorm(2, 16, eps=1e-3, affine=affine)(x))
    assert repr(model[0]) == repr(nn.GroupNorm(2, 16, eps=1e-3, affine=affine))


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_was_replaced_on_the_norm_is_refused(way: str) -> None:
    model = small_model()
    model[1].forward = types.MethodType(lambda self, x: x, model[1])
    with pytest.raises(TaskError, match="BatchNorm"):
        WAYS[way](model)


@pytest.mark.parametrize("way", WAYS)
def test_a_parametrization_of_a_norm_is_refused(way: str) -> None:
    model = small_model()
    parametrize.register_parametrization(model[1], "weight", nn.Softplus())
    with pytest.raises(TaskError, match="BatchNorm"):
        WAYS[way](model)
