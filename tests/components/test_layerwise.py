"""LARS and LAMB against their formulas by hand and in numpy.

In a loop of one's own and in the guarded update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from surefoot.components.optim import saving
from surefoot.components.optim.build import build as build_optimizer
from surefoot.components.optim.groups import find_trained
from surefoot.components.optim.kinds.layerwise import Lamb, Lars
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.spec import OptimTable
from surefoot.core.errors import RenamedKeyWarning, SpecError, TaskError
from tests.components.test_optim import STEPS, gradients_of, network

KINDS: dict[str, Callable[..., Any]] = {
    "lars": lambda p, **how: Lars(
        p, lr=0.5, momentum=0.9, weight_decay=0.01, trust_coefficient=0.02, **how
    ),
    "lamb": lambda p, **how: Lamb(
        p, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.01, **how
    ),
}


def reference(
    name: str, start: list[np.ndarray], gradients: list[list[np.ndarray]], adapts: list[bool]
) -> list[np.ndarray]:
    """The weights after all steps, in float64, written down from the papers."""
    ends = []
    for number, (w, adapt) in enumerate(zip(start, adapts, strict=True)):
        w, m, v = w.astype(np.float64), np.zeros_like(w, np.float64), np.zeros_like(w, np.float64)
        for t, step in enumerate(gradients, start=1):
            g = step[number].astype(np.float64)
            if name == "lars":
                rate = (
                    0.02 * np.linalg.norm(w) / (np.linalg.norm(g) + 0.01 * np.linalg.norm(w))
                    if adapt
                    else 1.0
                )
                m = 0.9 * m + 0.5 * rate * (g + 0.01 * w)
                w = w - m
            else:
                m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
                u = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-6) + 0.01 * w
                w = w - 0.02 * (np.linalg.norm(w) / np.linalg.norm(u) if adapt else 1.0) * u
        ends.append(w)
    return ends


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("is_fused", [True, False])
def test_the_weights_after_many_steps_equal_those_of_the_papers_formulas_in_numpy(
    name: str, is_fused: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes, adapts = [(6, 5), (4, 3, 3, 3), (7,)], [True, True, False]
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(20)]
    start = [weight.detach().numpy().copy() for weight in weights]
    optimizer = KINDS[name](
        [{"params": weights[:2]}, {"params": weights[2:], "adapt": False}], fused=is_fused
    )
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    expected = reference(name, start, [[g.numpy() for g in step] for step in gradients], adapts)
    for weight, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(
            weight.detach().numpy(), other, rtol=0, atol=1e-6 * np.abs(other).max()
        )


def test_a_step_of_lars_and_of_lamb_done_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))  # |w| = 5
    weight.grad = torch.tensor([0.0, 2.0])  # |g| = 2
    Lars([weight], lr=0.1, momentum=0.9, weight_decay=0.1, trust_coefficient=0.5).step()
    # r = 0.5 * 5 / (2 + 0.1 * 5) = 1; v = 0.1 * (g + 0.1 w) = (0.03, 0.24)
    torch.testing.assert_close(weight.detach(), torch.tensor([2.97, 3.76]), rtol=0, atol=1e-6)
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([0.5, -2.0])
    Lamb([weight], lr=0.1, eps=1e-12, weight_decay=0.0).step()
    # the first direction of Adam is the sign, (1, -1), whose norm is sqrt(2)
    torch.testing.assert_close(
        weight.detach(), torch.tensor([3 - 0.5 / 2**0.5, 4 + 0.5 / 2**0.5]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("name", KINDS)
def test_where_a_norm_is_zero_the_ratio_is_one(name: str) -> None:
    of_nothing, at_rest = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
    of_nothing.grad, at_rest.grad = torch.full((4,), 2.0), torch.zeros(4)
    if name == "lars":
        Lars([of_nothing, at_rest], lr=0.5, weight_decay=0.1).step()
        expected = (-1.0, 1 - 0.5 * 0.1)
    else:
        Lamb([of_nothing, at_rest], lr=0.5, weight_decay=0.0).step()
        expected = (-0.5, 1.0)
    assert of_nothing.tolist() == pytest.approx([expected[0]] * 4, rel=1e-5)
    assert at_rest.tolist() == pytest.approx([expected[1]] * 4)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float64, torch.float64), (torch.float64, torch.float32)],
    ids=["float64", "both"],
)
def test_weights_in_float64_are_divided_clipped_and_moved_in_float64(
    name: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    draws = torch.Generator().manual_seed(5)
    weights = [
        nn.Parameter(torch.randn(6, 5, generator=draws, dtype=torch.float64).to(dtype))
        for dtype in dtypes
    ]
    start = [weight.detach().double().numpy().copy() for weight in weights]
    guarded, gradients = GuardedUpdate([KINDS[name](weights, fused=True)], clip=0.1), []
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.randn(6, 5, generator=draws, dtype=torch.float64).to(weight.dtype)
        summed = [weight.grad.double() for weight in weights if weight.grad is not None]
        norm = 0.25 * torch.linalg.vector_norm(torch.stack(summed))
        gradients.append([(0.25 * 0.1 / (norm + 1e-6) * each).numpy() for each in summed])
        assert guarded.step_if_finite(0.25) == (pytest.approx(norm.item()), True)
    expected = reference(name, start, gradients, [True, True])
    for weight, other in zip(weights, expected, strict=True):
        exact = 1e-12 if dtypes[1] == torch.float64 else 1e-5
        np.testing.assert_allclose(weight.detach().numpy(), other, rtol=0, atol=exact)


@pytest.mark.parametrize("name", KINDS)
def test_biases_norms_and_embeddings_move_at_the_rate_of_all(name: str) -> None:
    model = nn.ModuleDict(
        {
            "emb": nn.Embedding(5, 4),
            "norm": nn.LayerNorm(4),
            "mid": nn.Linear(4, 4),
            "head": nn.Linear(4, 5),
        }
    )
    built = build_optimizer(OptimTable.model_validate({"name": name}), find_trained(model))
    adapts = {
        name: group["adapt"]
        for each in built.optimizers
        for group in each.param_groups
        for name in group["names"]
    }
    assert adapts == {
        "emb.weight": False,
        "norm.weight": False,
        "norm.bias": False,
        "mid.weight": True,
        "mid.bias": False,
        "head.weight": True,
        "head.bias": False,
    }
    assert sum("a separate learning rate for each layer" in line for line in built.summary) == 1


@pytest.mark.parametrize("name", KINDS)
def test_the_guarded_update_divides_clips_and_skips_as_by_hand(name: str) -> None:
    for is_fused in (True, False):
        ours, theirs = network(), network()
        guarded = GuardedUpdate([KINDS[name](ours.parameters(), fused=is_fused)], clip=0.05)
        optimizer = KINDS[name](theirs.parameters(), fused=is_fused)
        for step in range(STEPS):
            gradients_of(ours, step)
            if step == 3:
                ours[4].weight.grad[0, 0] = float("nan")
                assert guarded.step_if_finite(0.25)[1] is False
                continue
            gradients_of(theirs, step)
            assert guarded.step_if_finite(0.25)[1] is True
            for parameter in theirs.parameters():
                parameter.grad *= 0.25
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
            optimizer.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_on_an_asynchronous_device_a_step_that_is_not_finite_moves_nothing(name: str) -> None:
    results = []
    for on_device in (False, True):
        model = network()
        made = KINDS[name](model.parameters())
        guarded = GuardedUpdate(
            [made],
            clip=0.05,
            curve=lambda step: 1 / (1 + step),
            total_steps=20,
            on_device=on_device,
        )
        assert guarded.on_device is on_device
        for step in range(STEPS):
            gradients_of(model, step)
            if step in (0, 4):
                next(iter(model.parameters())).grad.fill_(float("inf"))  # type: ignore[union-attr]
                before = copy.deepcopy(
                    [
                        *model.parameters(),
                        *(value for row in made.state.values() for value in row.values()),
                    ]
                )
                assert not guarded.step_if_finite(0.5)[1]
                after = [
                    *model.parameters(),
                    *(value for row in made.state.values() for value in row.values()),
                ]
                assert all(
                    torch.equal(one, other) for one, other in zip(before, after, strict=True)
                )
            else:
                assert guarded.step_if_finite(0.5)[1]
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_a_state_dict_goes_on_exactly_and_a_parameter_may_be_without_a_gradient(name: str) -> None:
    whole, parts = network(), network()
    one, two = KINDS[name](whole.parameters()), KINDS[name](parts.parameters())
    for step in range(STEPS):
        for model in (whole, parts):
            gradients_of(model, step)
            if step % 3 == 1:
                model[6].weight.grad = None
        if step == STEPS // 2:
            saved = copy.deepcopy(two.state_dict())
            two = KINDS[name](parts.parameters())
            two.load_state_dict(saved)
        one.step()
        two.step()
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(whole.parameters(), parts.parameters(), strict=True)
    )
    for is_fused in (True, False):
        made = KINDS[name](whole.parameters(), fused=is_fused)
        assert GuardedUpdate([made], total_steps=1, on_device=True).on_device is is_fused


@pytest.mark.parametrize("name", KINDS)
def test_complex_weights_are_moved_as_their_real_and_imaginary_parts(name: str) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    parts = nn.Parameter(torch.view_as_real(weight.detach()).clone())
    one, other = KINDS[name]([weight]), KINDS[name]([parts])
    for _ in range(3):
        weight.grad = torch.randn(4, 4, dtype=torch.complex64)
        parts.grad = torch.view_as_real(weight.grad).clone()
        one.step()
        other.step()
    torch.testing.assert_close(torch.view_as_real(weight), parts)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Lars, {"lr": -1.0}),
        (Lars, {"lr": float("nan")}),
        (Lars, {"weight_decay": -1.0}),
        (Lars, {"trust_coefficient": 0.0}),
        (Lars, {"momentum": 1.0}),
        (Lamb, {"lr": "fast"}),
        (Lamb, {"betas": (1.0, 0.9)}),
        (Lamb, {"betas": (0.9, -0.1)}),
        (Lamb, {"eps": -1e-6}),
    ],
)
def test_settings_that_would_not_bring_weights_down_are_refused(
    kind: Any, settings: dict[str, Any]
) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    name = next(iter(settings))
    with pytest.raises(SpecError, match=rf"^{name} is "):
        kind([weight], **settings)
    with pytest.raises(SpecError, match=rf"^{name} is "):
        kind([{"params": [weight], **settings}])


@pytest.mark.parametrize(
    "limits",
    [
        {"clip": -1.0},
        {"clip": float("nan")},
        {"clip": "a"},
        {"clip_value": 0.0},
        {"clip_value": -1.0},
        {"clip_value": float("nan")},
    ],
)
def test_limits_that_are_none_are_refused_when_an_update_is_built(limits: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(SpecError, match=rf"^{next(iter(limits))} is "):
        GuardedUpdate([torch.optim.SGD([weight], lr=0.1)], **limits)


def test_gradients_times_nothing_are_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    update = GuardedUpdate([torch.optim.SGD([weight], lr=0.1)])
    weight.sum().backward()
    for factor in (0.0, -1.0):
        with pytest.raises(SpecError, match=f"multiplied by {factor}"):
            update.step_if_finite(factor)
    assert torch.equal(weight, torch.ones(2))


def test_a_gradient_that_is_sparse_is_named() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    update = GuardedUpdate([torch.optim.SGD(table.parameters(), lr=0.1, fused=True)])
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TaskError, match="a gradient is sparse"):
        update.step_if_finite()


def test_the_previous_name_of_the_trust_coefficient_is_read_with_a_warning() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    for settings in (
        ([weight], {"trust": 0.02}),
        ([{"params": [weight], "trust": 0.02}], {}),
    ):
        with pytest.warns(RenamedKeyWarning, match="trust of Lars is now trust_coefficient"):
            old = Lars(settings[0], **settings[1])
        assert old.param_groups[0]["trust_coefficient"] == 0.02
        assert "trust" not in old.param_groups[0]


def test_states_that_the_previous_release_saved_are_restored() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    saved = Lars([weight], trust_coefficient=0.02).state_dict()
    (group,) = saved["param_groups"]
    group["trust"] = group.pop("trust_coefficient")
    optimizer = Lars([weight])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["trust_coefficient"] == 0.02
    assert "trust" not in optimizer.param_groups[0]
    named = {id(weight): "weight"}
    kept = saving.state_of(optimizer, [weight], named)
    kept["groups"][0]["trust"] = kept["groups"][0].pop("trust_coefficient")
    other = Lars([weight])
    saving.restore(other, kept, [weight], named)
    assert other.param_groups[0] == optimizer.param_groups[0]
