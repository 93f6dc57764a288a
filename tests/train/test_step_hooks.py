"""Hooks on the steps of optimizers, and a `step` of the user's own, run in a guarded update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from surefoot import Loss, RunSpec
from surefoot.components.optim.in_backward import UpdateInBackward
from surefoot.components.optim.kinds.eight_bits import Adam8bit
from surefoot.components.optim.kinds.layerwise import Lamb, Lars
from surefoot.components.optim.update import GuardedUpdate
from surefoot.core.errors import InputError, SpecError
from surefoot.train.run import Run
from surefoot.train.step.joined import whole
from tests.train.small import Small, spec

STEPS, LIMIT = 6, 0.3
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": functools.partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": functools.partial(Adam, lr=0.05, fused=True),
    "adamw": functools.partial(AdamW, lr=0.05, weight_decay=0.1, fused=True),
    "lars": functools.partial(Lars, lr=0.5, fused=True),
    "lamb": functools.partial(Lamb, lr=0.05, fused=True),
    "8bit": functools.partial(Adam8bit, lr=0.05),
}


@torch.no_grad()
def clip(optimizer: Optimizer, *_: Any) -> None:
    """Limit the weights, as of the critic of a WGAN."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.clamp_(-LIMIT, LIMIT)


def keep(optimizer: Optimizer, *_: Any) -> None:
    """Stop the gradient of the first row."""
    optimizer.param_groups[0]["params"][0].grad[0].zero_()


@contextmanager
def before(optimizer: Optimizer) -> Iterator[None]:
    handle = optimizer.register_step_pre_hook(keep)
    yield
    handle.remove()


@contextmanager
def after(optimizer: Optimizer) -> Iterator[None]:
    handle = optimizer.register_step_post_hook(clip)
    yield
    handle.remove()


@contextmanager
def before_all(optimizer: Optimizer) -> Iterator[None]:
    handle = register_optimizer_step_pre_hook(keep)
    yield
    handle.remove()


@contextmanager
def after_all(optimizer: Optimizer) -> Iterator[None]:
    handle = register_optimizer_step_post_hook(clip)
    yield
    handle.remove()


@contextmanager
def replaced(optimizer: Any) -> Iterator[None]:
    """As libraries replace it that average weights."""
    step = optimizer.step

    @functools.wraps(step)
    def both(*given: Any, **named: Any) -> Any:
        done = step(*given, **named)
        clip(optimizer)
        return done

    optimizer.step = both
    yield
    del optimizer.step


HOOKS = (before, after, before_all, after_all, replaced)


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 40, generator=draw), torch.randn(8, 128, generator=draw))
        for _ in range(STEPS)
    ]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(40, 128, bias=False)  # large enough for moments in 8 bits


def plain(make: Any, hook: Any, span: range) -> nn.Module:
    model = small_model()
    optimizer = make(model.parameters())
    for step, (x, y) in enumerate(data()):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step in span:
            with hook(optimizer):
                optimizer.step()
        else:
            optimizer.step()
    return model


def guarded(make: Any, hook: Any, span: range, **named: Any) -> nn.Module:
    model = small_model()
    optimizer = make(model.parameters())
    update = GuardedUpdate([optimizer], clip=0.5, **named)
    for step, (x, y) in enumerate(data()):
        update.clear_gradients()
        (model(x) - y).square().mean().backward()
        if step in span:
            with hook(optimizer):
                assert update.step_if_finite()[1]
        else:
            assert update.step_if_finite()[1]
    assert update.applied_steps == STEPS
    return model


@pytest.mark.parametrize("span", [range(STEPS), range(2, 4)], ids=["always", "in the loop"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_hook_on_a_step_is_called_as_in_a_plain_loop(name: str, hook: Any, span: range) -> None:
    found, expected = guarded(MAKERS[name], hook, span), plain(MAKERS[name], hook, span)
    torch.testing.assert_close(
        list(found.parameters()), list(expected.parameters()), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("hook", [after, replaced])
def test_an_update_that_the_device_decides_calls_a_hook_that_the_loop_adds(hook: Any) -> None:
    found = guarded(MAKERS["adamw"], hook, range(2, 6), on_device=True, total_steps=STEPS)
    expected = plain(MAKERS["adamw"], hook, range(2, 6))
    torch.testing.assert_close(list(found.parameters()), list(expected.parameters()))


@pytest.mark.parametrize("base", [AdamW, SGD, Lars, Lamb])
def test_a_step_that_a_subclass_overrides_is_called(base: Any) -> None:
    class Clipped(base):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            done = super().step(closure)
            clip(self)
            return done

    make = functools.partial(Clipped, lr=0.05, fused=True)
    found, expected = (way(make, after, range(0)) for way in (guarded, plain))
    assert max(each.abs().max() for each in found.parameters()) <= LIMIT
    torch.testing.assert_close(
        list(found.parameters()), list(expected.parameters()), rtol=1e-4, atol=1e-6
    )


def test_a_step_that_is_skipped_calls_no_hook() -> None:
    model, seen = small_model(), list[str]()
    optimizer = MAKERS["adamw"](model.parameters())
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    update = GuardedUpdate([optimizer])
    for factor in (1.0, float("nan")):
        update.clear_gradients()
        model(torch.ones(2, 40)).sum().mul(factor).backward()
        update.step_if_finite()
    assert seen == ["after"]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_scheduler_of_torch_leaves_the_fused_update_and_its_bits(name: str) -> None:
    """It replaces `step` by a wrapper that only counts calls."""
    models = [small_model(), small_model()]
    updates = []
    for number, model in enumerate(models):
        optimizer = MAKERS[name](model.parameters())
        updates.append(GuardedUpdate([optimizer]))
        if number:
            torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
            assert "step" in vars(optimizer)
    for x, y in data():
        for model, update in zip(models, updates, strict=True):
            update.clear_gradients()
            (model(x) - y).square().mean().backward()
            update.step_if_finite()
            assert update.places() is not None
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


class Critic(Small):
    """Its optimizer limits the weights after each step."""

    def __init__(self, hook: Any = clip) -> None:
        super().__init__()
        self.hook = hook

    def optimizer(self, groups: Any) -> Optimizer:
        made = AdamW(groups, lr=0.05, fused=True)
        made.register_step_post_hook(self.hook)
        return made


def test_a_run_calls_the_hooks_of_the_optimizer_of_its_task(tmp_path: Path) -> None:
    with Run(spec(8), Critic(), folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            for each in run.model.parameters():
                assert each.abs().max() <= LIMIT


def test_a_run_with_hooks_resumes_to_the_same_bits(tmp_path: Path) -> None:
    weights = []
    for name, stops in (("whole", (0,)), ("parts", (4, 0))):
        for stop in stops:
            with Run(spec(8), Critic(), folder=tmp_path / name, quiet=True) as run:
                for report in run.steps():
                    if report.step == stop:
                        break
        weights.append([each.detach().clone() for each in run.model.parameters()])
    assert all(map(torch.equal, *weights))


REFUSED = {
    "in backward": {
        "memory": {"update_in_backward": True},
        "stability": {"nonfinite": "stop"},
        "optim": {"clip": 0.0},
    },
    "one graph": {"compile": {"what": "step"}},
}


@pytest.mark.parametrize("tables", REFUSED.values(), ids=REFUSED)
def test_a_mode_that_calls_no_step_refuses_hooks_before_step_1(tables: Any, tmp_path: Path) -> None:
    stated: RunSpec = spec(8, **tables)
    with (
        pytest.raises(InputError, match="hooks on its steps") as caught,
        Run(stated, Critic(), folder=tmp_path / "run", quiet=True),
    ):
        pass
    assert "remove the hooks" in str(caught.value.hint)


def test_a_mode_that_calls_no_step_names_a_hook_that_the_loop_adds() -> None:
    models = small_model(), small_model()
    optimizers = [MAKERS["sgd"](model.parameters()) for model in models]
    inside = UpdateInBackward(GuardedUpdate(optimizers[:1]))
    step = whole.compile_step(
        models[1],
        lambda model, batch: Loss.sum(model(batch).sum(), len(batch)),
        GuardedUpdate(optimizers[1:]),
    )
    with after(optimizers[0]), pytest.raises(InputError, match="hooks on its steps"):
        inside.step(lambda: models[0](torch.ones(2, 40)).sum().backward())
    with after(optimizers[1]), pytest.raises(SpecError, match="hooks on its steps"):
        step(torch.ones(2, 40))
