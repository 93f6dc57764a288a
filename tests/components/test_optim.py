"""Groups, the guarded fused update, Muon over filters, averages: against torch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.components.optim import fused
from surefoot.components.optim.average import WeightAverage
from surefoot.components.optim.build import build as build_optimizer
from surefoot.components.optim.groups import build_groups, check_cover, find_trained, freeze
from surefoot.components.optim.kinds.muon import FlatMuon, as_matrix
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.spec import OptimTable
from surefoot.core.errors import SpecError, TaskError

STEPS = 12


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def gradients_of(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x, y = (
        torch.randn(16, 1, 8, 8, generator=generator),
        torch.randint(0, 3, (16,), generator=generator),
    )
    model.zero_grad()
    F.cross_entropy(model(x.to(next(model.parameters()))), y).backward()


MAKERS = {
    "adamw": lambda p, how: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **how),
    "adam": lambda p, how: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, **how),
    "sgd": lambda p, how: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, **how
    ),
    "plain sgd": lambda p, how: torch.optim.SGD(p, lr=0.1, **how),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_in_float64_is_divided_and_clipped_in_float64(name: str) -> None:
    """torch's kernels take what they divide by in 32 bits."""
    ours, theirs = network().double(), network().double()
    guarded = GuardedUpdate([MAKERS[name](ours.parameters(), {"fused": True})], clip=0.05)
    reference = MAKERS[name](theirs.parameters(), {"foreach": False, "fused": False})
    for step in range(STEPS):
        gradients_of(ours, step)
        gradients_of(theirs, step)
        guarded.step_if_finite(1 / 3)
        for parameter in theirs.parameters():
            parameter.grad /= 3
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_direct_update_equals_torchs_own_step_after_its_own_clipping(
    name: str, clip: float
) -> None:
    ours, theirs = network(), network()
    guarded = GuardedUpdate([MAKERS[name](ours.parameters(), {"fused": True})], clip=clip)
    reference = MAKERS[name](theirs.parameters(), {"foreach": False, "fused": False})
    for step in range(STEPS):
        gradients_of(ours, step)
        gradients_of(theirs, step)
        norm, applied = guarded.step_if_finite()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or 1e9)
        reference.step()
        assert applied is True
        assert norm == pytest.approx(float(expected), rel=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_an_update_that_is_not_fused_is_torchs_own_and_gives_the_same_weights(name: str) -> None:
    models = []
    for is_fused in (True, False):
        model = network()
        table = OptimTable.model_validate({"name": name, "lr": 0.01, "fused": is_fused})
        built = build_optimizer(table, find_trained(model))
        assert any(fused.supports(each) for each in built.optimizers) is is_fused
        guarded = GuardedUpdate(built.optimizers, clip=0.05)
        for step in range(STEPS):
            gradients_of(model, step)
            guarded.step_if_finite()
        models.append(model)
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_without_the_private_kernels_the_public_step_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for is_public in (False, True):
        model = network()
        if is_public:
            monkeypatch.delattr(torch, "_fused_adamw_")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=not is_public)
        guarded = GuardedUpdate([optimizer], clip=0.05)
        assert fused.supports(optimizer) is not is_public
        for step in range(STEPS):
            gradients_of(model, step)
            guarded.step_if_finite(0.5)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", MAKERS)
def test_a_skipped_step_moves_nothing_even_when_it_is_the_first(name: str) -> None:
    skipping, clean = network(), network()
    ours = GuardedUpdate([MAKERS[name](skipping.parameters(), {"fused": True})])
    other = GuardedUpdate([MAKERS[name](clean.parameters(), {"fused": True})])
    for step in range(STEPS):
        if step in (0, 5):
            gradients_of(skipping, 99)
            next(iter(skipping.parameters())).grad[0, 0, 0, 0] = float("nan")  # type: ignore[index]
            _, applied = ours.step_if_finite()
            assert applied is False
            skipping.load_state_dict(
                skipping.state_dict()
                | {k: v for k, v in clean.state_dict().items() if "running" in k or "num" in k}
            )
        gradients_of(skipping, step)
        gradients_of(clean, step)
        ours.step_if_finite()
        other.step_if_finite()
    assert ours.applied_steps == STEPS
    for mine, theirs in zip(skipping.parameters(), clean.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_on_an_asynchronous_device_the_same_decisions_are_taken_without_the_host() -> None:
    results = []
    for on_device in (False, True):
        model = network()
        guarded = GuardedUpdate(
            [MAKERS["adamw"](model.parameters(), {"fused": True})],
            clip=0.05,
            curve=lambda step: 1 / (1 + step),
            total_steps=20,
            on_device=on_device,
        )
        applied = []
        for step in range(STEPS):
            gradients_of(model, step)
            if step == 4:
                next(iter(model.parameters())).grad.fill_(float("inf"))  # type: ignore[union-attr]
            applied.append(bool(guarded.step_if_finite(0.5)[1]))
        assert guarded.on_device is on_device
        results.append(
            (
                applied,
                guarded.rates,
                [parameter.detach().clone() for parameter in model.parameters()],
            )
        )
    assert results[0][0] == results[1][0] == [step != 4 for step in range(STEPS)]
    assert results[0][1] == pytest.approx(results[1][1])
    for mine, theirs in zip(results[0][2], results[1][2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_clipping_by_value_holds_every_element_and_equals_torchs() -> None:
    ours, theirs = network(), network()
    guarded = GuardedUpdate(
        [torch.optim.SGD(ours.parameters(), lr=1.0, fused=True)], clip_value=1e-3
    )
    gradients_of(ours, 1)
    gradients_of(theirs, 1)
    guarded.step_if_finite()
    torch.nn.utils.clip_grad_value_(theirs.parameters(), 1e-3)
    torch.optim.SGD(theirs.parameters(), lr=1.0).step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


def test_a_parameter_without_a_gradient_for_a_while_counts_its_own_steps() -> None:
    ours, theirs = network(), network()
    guarded = GuardedUpdate([torch.optim.AdamW(ours.parameters(), lr=0.01, fused=True)])
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for step in range(STEPS):
        for model in (ours, theirs):
            gradients_of(model, step)
            if step % 3 == 1:
                model[6].weight.grad = None
        guarded.step_if_finite()
        reference.step()
    torch.testing.assert_close(ours[6].weight, theirs[6].weight, rtol=1e-5, atol=1e-7)


def test_muon_takes_filters_and_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    model = network()
    built = build_optimizer(OptimTable(name="muon", lr=0.01), find_trained(model))
    muon, adamw = built.optimizers
    assert isinstance(muon, FlatMuon)
    assert {tuple(p.shape) for group in muon.param_groups for p in group["params"]} == {
        (4, 1, 3, 3),
        (8, 144),
    }
    kept = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert id(model[6].weight) in kept, "the head belongs to AdamW"


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_muon_on_a_filter_equals_muon_on_the_same_matrix(
    memory_format: torch.memory_format,
) -> None:
    torch.manual_seed(0)
    filters = nn.Parameter(torch.randn(6, 5, 3, 3).to(memory_format=memory_format))
    matrix = nn.Parameter(as_matrix(filters.detach()).clone())
    ours = GuardedUpdate([FlatMuon([{"params": [filters]}], lr=0.1, momentum=0.9, nesterov=True)])
    theirs = torch.optim.Muon(
        [matrix],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
    )
    for _ in range(4):
        filters.grad = torch.randn(6, 5, 3, 3).to(memory_format=memory_format)
        matrix.grad = as_matrix(filters.grad, like=filters).clone()
        ours.step_if_finite()
        theirs.step()
    torch.testing.assert_close(as_matrix(filters.detach()), matrix.detach())


def test_norms_biases_and_embeddings_do_not_decay_and_patterns_have_their_own_rates() -> None:
    model = nn.ModuleDict(
        {
            "emb": nn.Embedding(5, 4),
            "norm": nn.LayerNorm(4),
            "mid": nn.Linear(4, 4),
            "head": nn.Linear(4, 5),
        }
    )
    groups = build_groups(find_trained(model), weight_decay=0.1, lr_multipliers={"head.*": 0.5})
    table = {
        name: (group["weight_decay"], group["rate"]) for group in groups for name in group["names"]
    }
    assert table["mid.weight"] == (0.1, 1.0)
    assert table["head.weight"] == (0.1, 0.5)
    assert table["head.bias"] == (0.0, 0.5)
    assert [table[name][0] for name in ("emb.weight", "norm.weight", "norm.bias", "mid.bias")] == [
        0.0
    ] * 4


def test_a_pattern_that_matches_nothing_is_refused_with_the_names() -> None:
    model = network()
    with pytest.raises(SpecError, match="matches no parameter"):
        build_groups(find_trained(model), weight_decay=0.1, lr_multipliers={"haed.*": 2.0})
    with pytest.raises(SpecError, match="freeze"):
        freeze(model, ["nothing.*"])


def test_tied_weights_stand_in_one_group_once() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["emb"].weight
    trained = find_trained(model)
    assert [(each.name, each.kind) for each in trained] == [("emb.weight", "embedding")]


@pytest.mark.parametrize("fault", ["none", "two"])
def test_a_parameter_in_no_group_or_in_two_is_an_error(fault: str) -> None:
    model = network()
    parameters: list[Any] = list(model.parameters())
    groups = (
        [{"params": parameters[:-1]}]
        if fault == "none"
        else [{"params": parameters}, {"params": parameters[:1]}]
    )
    with pytest.raises(TaskError, match="no group" if fault == "none" else "two groups"):
        check_cover(model, groups)


def test_frozen_layers_stay_bitwise_and_take_no_optimizer_memory() -> None:
    model = network()
    before = copy.deepcopy(model[0].state_dict())
    freeze(model, ["0.*"])
    built = build_optimizer(OptimTable(lr=0.1), find_trained(model))
    guarded = GuardedUpdate(built.optimizers)
    for step in range(3):
        gradients_of(model, step)
        guarded.step_if_finite()
    assert all(torch.equal(value, before[name]) for name, value in model[0].state_dict().items())
    assert all(id(model[0].weight) != id(p) for each in built.optimizers for p in each.state)


def test_the_average_follows_its_formula_and_is_swapped_in_and_out() -> None:
    weight = nn.Parameter(torch.zeros(3))
    average = WeightAverage([weight], decay=0.5)
    expected = torch.zeros(3)
    for step in range(5):
        with torch.no_grad():
            weight += 1.0
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight.detach()
        average.update()
    own = weight.detach().clone()
    with average.swapped_in():
        torch.testing.assert_close(weight.detach(), expected)
    assert torch.equal(weight.detach(), own)


def test_an_embedding_whose_gradient_would_be_sparse_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(
        TaskError,
        match=(
            r"the gradient of 0\.weight is sparse, "
            r"but the optimizers of \[optim\] need dense gradients"
        ),
    ):
        build_optimizer(OptimTable(), find_trained(model))
    model[0].weight.requires_grad_(False)
    assert [each.name for each in find_trained(model)] == ["1.weight", "1.bias"]


WRAPS: dict[str, Any] = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("wrap", WRAPS)
def test_what_a_weight_is_made_of_has_the_kind_of_its_module(wrap: str) -> None:
    model = nn.Sequential(
        WRAPS[wrap](nn.Embedding(6, 4)),
        WRAPS[wrap](nn.Linear(4, 8)),
        nn.ReLU(),
        WRAPS[wrap](nn.Linear(8, 3)),
    )
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kinds = {each.name: each.kind for each in find_trained(model)}
    assert kinds.keys() == dict(model.named_parameters()).keys()
    assert {kind for name, kind in kinds.items() if name.startswith("0.")} == {"embedding"}
    assert {
        kind for name, kind in kinds.items() if name.startswith("1.") and "bias" not in name
    } == {"matrix"}
    assert {
        kind for name, kind in kinds.items() if name.startswith("3.") and "bias" not in name
    } == {"head"}
    # no step of a power iteration
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
