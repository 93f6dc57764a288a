"""The whole step as one graph: the numbers of the step told in order, its guard, its resume, and what it refuses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.compiler import compile_function
from surefoot.components.optim import GuardedUpdate
from surefoot.contract.events import Compiled, Fault
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.core.errors import SpecError, SurefootError, TaskError
from surefoot.train.run import Run
from surefoot.train.step import whole
from tests.train.small import OPTIMIZERS, Small, assert_same, records, spec, state_of


class Left(SurefootError):
    """How a loop of the tests is left."""


TRACEABLE = ("adamw", "adam", "sgd", "plain sgd")


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The graph is captured as always, its backward pass with it, and run by torch's own kernels: making code takes tens of seconds."""
    monkeypatch.setattr(whole, "compile_function", functools.partial(compile_function, backend="aot_eager"))
    was = torch._dynamo.config.trace_autograd_ops
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.trace_autograd_ops = was


def stated(what: str, steps: int = 12, **tables: Any) -> RunSpec:
    return spec(steps, compile={"what": what}, observe={"every": "1 step"}, **tables)


def train(made: RunSpec, task: Any, folder: Path, steps: int | None = None) -> tuple[list[float], dict[str, Tensor], Run]:
    losses = []
    torch._dynamo.reset()
    with contextlib.suppress(Left), Run(made, task, folder=folder, quiet=True) as run:
        for report in run.steps():
            losses.append(float(report.loss or 0.0))
            if report.step == steps:
                raise Left("left")
    gradients = {f"gradient of {name}": each.grad.clone() for name, each in run.model.named_parameters() if each.grad is not None}
    return losses, state_of(run) | gradients, run


def graphs(folder: Path) -> list[Compiled]:
    return [event for event in records(folder) if isinstance(event, Compiled)]


@pytest.mark.parametrize("name", TRACEABLE)
def test_the_whole_step_gives_the_numbers_of_the_step_told_in_order(name: str, tmp_path: Path) -> None:
    """Dropout, BatchNorm, clipping that bites, an average of the weights and a last batch that is smaller."""
    limit = {"clip": 0.0, "clip_value": 0.01} if name == "adam" else {"clip": 0.05}
    tables = {"optim": {**OPTIMIZERS[name], **limit, "ema": 0.9}, "train": {"batch": 7}}
    task = Small(dropout=0.1, norm=True)
    told, expected, _ = train(stated("none", **tables), task, tmp_path / "told")
    losses, state, _ = train(stated("step", **tables), task, tmp_path / "whole")
    assert losses == pytest.approx(told, rel=1e-5)
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6, msg=key)
    assert 1 <= len(graphs(tmp_path / "whole")) <= 3
    assert not [event for event in records(tmp_path / "whole") if isinstance(event, Fault)]


class Spare(Small):
    """A layer that nobody calls, and one that does not train."""

    def model(self) -> nn.Module:
        model = super().model()
        model[0].bias.requires_grad_(False)  # type: ignore[index,union-attr]
        model.add_module("spare", nn.Linear(3, 3))
        return model

    def forward(self, model: Any, batch: Any) -> Tensor:
        output: Tensor = model[:5](batch[0])
        return output


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_what_has_no_gradient_stays_as_it_is(name: str, tmp_path: Path) -> None:
    told, expected, _ = train(stated("none", optim=OPTIMIZERS[name]), Spare(), tmp_path / "told")
    losses, state, _ = train(stated("step", optim=OPTIMIZERS[name]), Spare(), tmp_path / "whole")
    assert losses == pytest.approx(told, rel=1e-5)
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6, msg=key)
    assert graphs(tmp_path / "whole")
    assert not [event for event in records(tmp_path / "whole") if isinstance(event, Fault)]


def test_a_step_whose_numbers_are_not_finite_moves_nothing(tmp_path: Path) -> None:
    task = Small(norm=True, poison=(3,))
    tables = {"stability": {"max_skips": 20}, "optim": {"ema": 0.9}}
    _, expected, told = train(stated("none", **tables), task, tmp_path / "told")
    _, state, run = train(stated("step", **tables), task, tmp_path / "whole")
    assert run.num_skipped == told.num_skipped >= 2
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6, msg=key)


def test_a_run_that_was_left_in_the_middle_ends_with_the_same_bits(tmp_path: Path) -> None:
    task, made = Small(dropout=0.1, norm=True), stated("step", checkpoint={"every": "4 steps", "background": False})
    losses, expected, _ = train(made, task, tmp_path / "unbroken")
    first, _, _ = train(made, task, tmp_path / "broken", steps=8)
    rest, state, _ = train(made, task, tmp_path / "broken")
    assert (first, rest) == (losses[:8], losses[4:])
    assert_same(state, expected)
    assert graphs(tmp_path / "broken")


def test_what_cannot_be_one_graph_is_taken_in_order_and_said(tmp_path: Path) -> None:
    class Prints(Small):
        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            output = super().forward(model, batch)
            return output * 2 if output.sum().item() > 1e9 else output

    told, expected, _ = train(stated("none"), Prints(), tmp_path / "told")
    losses, state, _ = train(stated("step"), Prints(), tmp_path / "whole")
    assert losses == told
    assert_same(state, expected)
    (fault,) = (event for event in records(tmp_path / "whole") if isinstance(event, Fault))
    assert fault.detail.startswith("the whole step cannot be compiled")
    assert fault.action == "it runs in eager mode"


REFUSED: dict[str, dict[str, Any]] = {
    "train.microbatch": {"train": {"microbatch": 2}},
    "update_in_backward": {
        "memory": {"update_in_backward": True},
        "optim": {"clip": 0.0},
        "stability": {"nonfinite": "stop"},
    },
    "memory.recompute": {"memory": {"recompute": "full", "blocks": ["0"]}},
    "memory.on_oom": {"memory": {"on_oom": "halve"}},
    "memory.offload": {"memory": {"offload": "optimizer"}},
    "fp16": {"precision": {"compute": "fp16"}},
    "an optimiser is FlatMuon": {"optim": {"name": "muon"}},
    "optim.fused = true": {"optim": {"fused": False}},
    "moves the momentum": {"schedule": {"name": "one_cycle"}},
    "precision.weights": {"precision": {"compute": "bf16", "weights": "bf16", "master": "none"}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_with_it_is_refused_before_anything_is_written(what: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused, Run(stated("step", **REFUSED[what]), Small(), folder=tmp_path / "run", quiet=True):
        pass
    assert 'compile.what = "step"' in refused.value.message
    assert what in f"{refused.value.message} {refused.value.hint}"
    assert not (tmp_path / "run").exists()


def test_a_run_says_after_how_many_steps_its_compiling_has_paid_for_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    with Run(stated("step", steps=40), Small(), folder=tmp_path / "run") as run:
        for _ in run.steps():
            pass
    said = capsys.readouterr()
    assert "of compiling are " in said.out + said.err


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=draws), torch.randint(0, 3, (8,), generator=draws)) for _ in range(count)]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    return Loss.sum(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


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


def test_a_loop_of_ones_own_is_told_what_cannot_be_one_graph() -> None:
    model = small_model()
    with pytest.raises(SpecError, match="an optimiser is RMSprop"):
        whole.compile_step(model, summed, GuardedUpdate([torch.optim.RMSprop(model.parameters())]))

    def looks(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = summed(model, batch)
        return loss if float(loss.terms[0].total) < 1e9 else summed(model, batch)

    step = whole.compile_step(model, looks, GuardedUpdate([torch.optim.SGD(model.parameters(), lr=0.1, fused=True)]))
    with pytest.raises(TaskError, match="the whole step cannot be compiled"):
        step(batches(1)[0])
