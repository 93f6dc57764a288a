"""`compile_step` in a loop of one's own: the numbers of the plain loop, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.optim.masters import store_narrow
from surefoot.components.optim.update import GuardedUpdate
from surefoot.components.precision.policy import PLAIN
from surefoot.components.precision.scaler import LossScaler
from surefoot.contract.state import master_of
from surefoot.contract.task import Loss
from surefoot.core.errors import SpecError, TaskError
from surefoot.train.step.joined import whole
from tests.train.test_whole_step import _anew, recompile_limit  # noqa: F401 - fixtures


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=draws), torch.randint(0, 3, (8,), generator=draws))
        for _ in range(count)
    ]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def bare_model() -> nn.Module:
    """As few parameters as two layers have: each makes a graph dearer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))


def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    return Loss.sum(
        nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])
    )


def test_a_loop_of_ones_own_compiles_its_whole_step() -> None:
    plain, model = small_model(), small_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    update = GuardedUpdate([torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)], clip=0.5)
    step = whole.compile_step(model, summed, update)
    for batch in batches(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(batch[0]), batch[1])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        (term,), found, applied = step(batch)
        assert applied
        torch.testing.assert_close(term.total / term.count, loss.detach())
        assert found == pytest.approx(norm.item(), rel=1e-5)
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
    before = [each.detach().clone() for each in model.parameters()]
    assert step((torch.full((8, 4), float("nan")), batches(1)[0][1]))[2] is False
    assert all(map(torch.equal, model.parameters(), before))


class Scaled(nn.Module):
    """A layer times a scalar, in one dtype, or with the scalar in another."""

    def __init__(self, dtype: torch.dtype, of_scale: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = (
            nn.Linear(4, 3, dtype=dtype),
            nn.Parameter(torch.tensor(1.5, dtype=of_scale)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.layer.weight)) * self.scale


@pytest.mark.quick("dtypes0")
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float32, torch.float32),
    ],
)
def test_a_parameter_without_dimensions_keeps_its_dtype(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    pairs = [
        (model, guarded_of(torch.optim.SGD, model, momentum=0.9, weight_decay=0.1))
        for model in (Scaled(*dtypes), Scaled(*dtypes))
    ]
    step = whole.compile_step(pairs[0][0], summed, pairs[0][1])
    for batch in batches(3):
        step(batch)
        told(*pairs[1], batch)
    assert [each.grad is not None and each.grad.dtype for each in pairs[0][0].parameters()] == [
        dtypes[1],
        dtypes[0],
        dtypes[0],
    ]
    coarse = 2e-2 if torch.bfloat16 in dtypes else 1e-5
    assert_alike(pairs, rtol=coarse, atol=coarse)


def test_an_update_that_no_graph_of_ones_own_can_hold_is_refused_with_what_keeps_it_from_it() -> (
    None
):
    model, wide = small_model(), Scaled(torch.float64, torch.float64)
    sgd, unfused = (
        torch.optim.SGD(model.parameters(), fused=True),
        torch.optim.AdamW(model.parameters()),
    )
    with pytest.raises(SpecError, match="an optimizer is AdamW without fused") as refused:
        whole.compile_step(model, summed, GuardedUpdate([sgd, unfused]))
    assert "fused=True in a loop of your own" in str(refused.value.hint)
    with pytest.raises(SpecError, match="an optimizer is AdamW with an option"):
        whole.compile_step(model, summed, guarded_of(torch.optim.AdamW, model, amsgrad=True))
    with pytest.raises(SpecError, match="a 0-dimensional parameter in float64"):
        whole.compile_step(wide, summed, guarded_of(torch.optim.SGD, wide, momentum=0.9))
    with pytest.raises(SpecError, match="an update without parameters"):
        whole.compile_step(model, summed, GuardedUpdate([]))


def test_a_group_without_parameters_moves_nothing() -> None:
    pairs = [
        (model, guarded_of(torch.optim.AdamW, model)) for model in (small_model(), small_model())
    ]
    model = pairs[0][0]
    groups: list[dict[str, Any]] = [{"params": []}, {"params": list(model.parameters())}]
    pairs[0] = (model, GuardedUpdate([torch.optim.AdamW(groups, lr=0.01, fused=True)], clip=0.5))
    for batch in batches(2):
        told(*pairs[0], batch)
        told(*pairs[1], batch)
    assert_alike(pairs)


def guarded_of(optimizer: Any, model: nn.Module, **settings: Any) -> GuardedUpdate:
    return GuardedUpdate(
        [optimizer(model.parameters(), **{"lr": 0.01, "fused": True, **settings})], clip=0.5
    )


def told(
    model: nn.Module, update: GuardedUpdate, batch: tuple[Tensor, Tensor], loss: Any = summed
) -> None:
    """A step told in order."""
    update.clear_gradients()
    (term,) = loss(model, batch).terms
    (term.total / term.count).backward()
    update.step_if_finite()


def assert_alike(pairs: list[tuple[nn.Module, GuardedUpdate]], **tolerance: float) -> None:
    (one, mine), (other, theirs) = pairs
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), **tolerance)  # type: ignore[arg-type]
    kept = [[dict(state) for _, state in update.states()] for update in (mine, theirs)]
    torch.testing.assert_close(kept[0], kept[1], **tolerance)  # type: ignore[arg-type]


CHANGES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "weight decay and betas": (
        torch.optim.AdamW,
        {},
        {"weight_decay": 0.5, "betas": (0.5, 0.9), "eps": 1e-3},
    ),
    "momentum": (
        torch.optim.SGD,
        {"momentum": 0.9},
        {"momentum": 0.2, "nesterov": True, "weight_decay": 0.3},
    ),
    "momentum on": (torch.optim.SGD, {}, {"momentum": 0.9}),
    "momentum off": (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["in the groups", pytest.param("by a state", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=pytest.mark.slow) if "decay" in what else what for what in CHANGES],
)
def test_settings_that_change_later_hold_from_the_next_step_on(what: str, how: str) -> None:
    kind, first, then = CHANGES[what]
    pairs = [(model, guarded_of(kind, model, **first)) for model in (small_model(), small_model())]
    (plain, update), (model, compiled) = pairs
    step = whole.compile_step(model, summed, compiled)
    often = what == "weight decay and betas" and how == "in the groups"
    for number, batch in enumerate(batches(12 if often else 5)):
        if number == 2 and how == "by a state":
            for each, guarded in pairs:
                other = guarded_of(kind, each, **{**first, **then})
                saved = guarded.state_dict()
                for into, of in zip(
                    saved["optimizers"], other.state_dict()["optimizers"], strict=True
                ):
                    into["groups"] = of["groups"]
                guarded.load_state_dict(saved)
        # each time another one: more often than torch compiles one function
        elif number >= 2 and how == "in the groups":
            for _, guarded in pairs:
                guarded.groups[0].update({**then, "weight_decay": 0.1 * number})
        told(plain, update, batch)
        step(batch)
        assert_alike(pairs, rtol=1e-4, atol=1e-6)


class Partly(nn.Module):
    """One layer in three is called, or two, as a batch says by its size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.seldom, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.used(x) + (self.seldom(x) if len(x) > 4 else 0.0)
        return output


@pytest.mark.slow
@pytest.mark.parametrize("grouped", ["all in one", "each its own"])
def test_counters_of_what_has_no_gradient_stand_still(grouped: str) -> None:
    pairs = []
    for model in (Partly(), Partly()):
        layers = (model.used, model.seldom, model.never)
        groups = [{"params": list(each.parameters())} for each in layers]
        single = [{"params": [parameter]} for parameter in model.parameters()]
        chosen = (
            [{"params": list(model.parameters())}]
            if grouped == "all in one"
            else [*groups[:2], *single[4:]]
        )
        pairs.append((model, GuardedUpdate([torch.optim.AdamW(chosen, lr=0.01, fused=True)])))
    (plain, update), (model, compiled) = pairs
    step = whole.compile_step(model, summed, compiled, dynamic=False)
    for number, (x, y) in enumerate(batches(8)):
        batch = (x, y) if number % 2 else (x[:4], y[:4])
        told(plain, update, batch)
        step(batch)
        assert_alike(pairs, rtol=1e-4, atol=1e-6)
    counters = {
        name: state["step"].item()
        for (name, _), (_, state) in zip(model.named_parameters(), compiled.states(), strict=True)
    }
    assert (counters["used.bias"], counters["seldom.bias"], counters["never.bias"]) == (8, 4, 0)


@pytest.mark.slow
def test_a_model_in_float64_is_moved_in_float64() -> None:
    plain, model = bare_model().double(), bare_model().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    step = whole.compile_step(model, summed, guarded_of(torch.optim.AdamW, model))
    for x, y in batches(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x.double()), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        step((x.double(), y))
    torch.testing.assert_close(
        list(model.parameters()), list(plain.parameters()), rtol=1e-12, atol=1e-13
    )


@pytest.mark.slow
def test_a_parameter_that_is_frozen_stays_and_may_be_thawed() -> None:
    pairs = [
        (model, guarded_of(torch.optim.AdamW, model)) for model in (bare_model(), bare_model())
    ]
    (plain, update), (model, compiled) = pairs
    step = whole.compile_step(model, summed, compiled)
    for number, batch in enumerate(batches(6)):
        for each, _ in pairs:
            each[0].weight.requires_grad_(number // 2 != 1)  # type: ignore[index,union-attr,operator]
        before = model[0].weight.detach().clone()  # type: ignore[index,union-attr,operator]
        told(plain, update, batch)
        step(batch)
        assert_alike(pairs, rtol=1e-4, atol=1e-6)
        assert torch.equal(before, model[0].weight) == (number // 2 == 1)  # type: ignore[index,arg-type]


def with_masters() -> tuple[nn.Module, GuardedUpdate]:
    model = small_model()
    store_narrow(model)
    return model, GuardedUpdate(
        [torch.optim.AdamW([master_of(each) for each in model.parameters()], fused=True)]
    )


def with_a_hook(kind: str) -> tuple[nn.Module, GuardedUpdate]:
    model = small_model()
    weight = next(model.parameters())
    if kind == "module":
        model.register_full_backward_hook(lambda module, into, out: None)
    else:
        getattr(weight, kind)(lambda tensor: None)
    return model, guarded_of(torch.optim.AdamW, model)


UNFIT: dict[str, Any] = {
    "bf16 weights with masters": with_masters,
    "hooks on gradients, as 0 has": lambda: with_a_hook("register_hook"),
    "hooks on gradients, as 0 has ": lambda: with_a_hook("register_post_accumulate_grad_hook"),
    "hooks on gradients, as the model has": lambda: with_a_hook("module"),
}


@pytest.mark.parametrize("words", UNFIT)
def test_what_a_graph_would_pass_over_is_refused(words: str) -> None:
    model, update = UNFIT[words]()
    with pytest.raises(SpecError, match=words.strip()):
        whole.compile_step(model, summed, update)


@pytest.mark.quick("register_post_accumulate_grad_hook")
@pytest.mark.parametrize(
    "kind", ["register_hook", "register_post_accumulate_grad_hook", "register_full_backward_hook"]
)
def test_a_hook_that_comes_later_is_told_and_the_step_goes_on_without_it(kind: str) -> None:
    model = bare_model()
    step = whole.compile_step(model, summed, guarded_of(torch.optim.SGD, model))
    first, second = batches(2)
    step(first)
    before = [each.detach().clone() for each in model.parameters()]
    owner = model if kind.endswith("backward_hook") else next(model.parameters())
    hook = getattr(owner, kind)(lambda *given: None)
    with pytest.raises(SpecError, match="does not support hooks on gradients, as "):
        step(second)
    assert all(map(torch.equal, model.parameters(), before))
    hook.remove()
    assert step(second)[2]


def test_what_is_given_is_checked_and_told_in_words() -> None:
    model = small_model()
    update = guarded_of(torch.optim.AdamW, model)
    scaled = replace(PLAIN, scaler=LossScaler())
    with pytest.raises(SpecError, match="fp16, whose gradients are scaled"):
        whole.compile_step(model, summed, update, policy=scaled)
    with pytest.raises(SpecError, match="update must be a GuardedUpdate; got a AdamW"):
        whole.compile_step(model, summed, torch.optim.AdamW(model.parameters(), fused=True))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="mode is 'fast'"):
        whole.compile_step(model, summed, update, mode="fast")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="dynamic is 'no'"):
        whole.compile_step(model, summed, update, dynamic="no")  # type: ignore[arg-type]
    step = whole.compile_step(model, lambda model, batch: model(batch[0]).sum(), update)
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(TaskError, match="the loss must be a Loss; got a Tensor"):
        step(batches(1)[0])
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.slow
@pytest.mark.usefixtures("recompile_limit")
def test_more_sizes_than_torch_compiles_are_told() -> None:
    model = bare_model()
    step = whole.compile_step(model, summed, guarded_of(torch.optim.SGD, model), dynamic=False)
    x, y = batches(1)[0]
    x, y = x.repeat(8, 1), y.repeat(8)
    with pytest.raises(TaskError, match="cannot be compiled: "):
        for size in range(2, 8):
            step((x[:size], y[:size]))


def test_a_loop_of_ones_own_is_told_what_cannot_be_one_graph() -> None:
    model = small_model()
    with pytest.raises(SpecError, match="an optimizer is RMSprop"):
        whole.compile_step(model, summed, GuardedUpdate([torch.optim.RMSprop(model.parameters())]))

    def looks(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = summed(model, batch)
        return loss if float(loss.terms[0].total) < 1e9 else summed(model, batch)

    step = whole.compile_step(
        model, looks, GuardedUpdate([torch.optim.SGD(model.parameters(), lr=0.1, fused=True)])
    )
    with pytest.raises(TaskError, match="the whole step cannot be compiled"):
        step(batches(1)[0])
