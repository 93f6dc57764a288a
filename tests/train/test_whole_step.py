"""The whole step as one graph: the numbers of the step told in order, guard, resume, refusals."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.components.compiler.regions import compile_function
from surefoot.contract.events import Compiled, Dtypes
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import SpecError, SurefootError
from surefoot.train.run import Run
from surefoot.train.step.joined import whole
from tests.train.small import OPTIMIZERS, Small, assert_same, faults_of, records, spec, state_of


class Left(SurefootError):
    """How a loop of the tests is left."""


TRACEABLE = ("adamw", "adam", "sgd", "plain sgd", "lars", "lamb")
COMMON = ("adamw", "sgd", "lamb")  # the others are of a kind with one of these


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The graph is captured as always, its backward pass with it, and run by torch's own kernels.

    Making code takes tens of seconds.
    """
    monkeypatch.setattr(
        whole, "compile_function", functools.partial(compile_function, backend="aot_eager")
    )
    was = torch._dynamo.config.trace_autograd_ops
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.trace_autograd_ops = was


def stated(what: str, steps: int = 12, **tables: Any) -> RunSpec:
    return spec(steps, compile={"what": what}, observe={"every": "1 step"}, **tables)


def train(
    made: RunSpec, task: Any, folder: Path, steps: int | None = None
) -> tuple[list[float], dict[str, Tensor], Run]:
    losses = []
    torch._dynamo.reset()
    with contextlib.suppress(Left), Run(made, task, folder=folder, quiet=True) as run:
        for report in run.steps():
            losses.append(float(report.loss or 0.0))
            if report.step == steps:
                raise Left("left")
    gradients = {
        f"gradient of {name}": each.grad.clone()
        for name, each in run.model.named_parameters()
        if each.grad is not None
    }
    return losses, state_of(run) | gradients, run


def graphs(folder: Path) -> list[Compiled]:
    return [event for event in records(folder) if isinstance(event, Compiled)]


@pytest.mark.quick("adamw")
@pytest.mark.parametrize(
    "name",
    [name if name in COMMON else pytest.param(name, marks=pytest.mark.slow) for name in TRACEABLE],
)
def test_the_whole_step_gives_the_numbers_of_the_step_told_in_order(
    name: str, tmp_path: Path
) -> None:
    """Dropout, BatchNorm, clipping that bites, averaged weights and a smaller last batch."""
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
    assert not faults_of(tmp_path / "whole")


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "sgd", "lars", "lamb"])
def test_what_has_no_gradient_stays_as_it_is(name: str, tmp_path: Path) -> None:
    told, expected, _ = train(stated("none", optim=OPTIMIZERS[name]), Spare(), tmp_path / "told")
    losses, state, _ = train(stated("step", optim=OPTIMIZERS[name]), Spare(), tmp_path / "whole")
    assert losses == pytest.approx(told, rel=1e-5)
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6, msg=key)
    assert graphs(tmp_path / "whole")
    assert not faults_of(tmp_path / "whole")


def test_a_step_whose_numbers_are_not_finite_moves_nothing(tmp_path: Path) -> None:
    task = Small(norm=True, poison=(3,))
    tables = {"stability": {"max_skips": 20}, "optim": {"ema": 0.9}}
    _, expected, told = train(stated("none", **tables), task, tmp_path / "told")
    _, state, run = train(stated("step", **tables), task, tmp_path / "whole")
    assert run.num_skipped == told.num_skipped >= 2
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.slow
# before and after the steps that are taken in order
@pytest.mark.parametrize(("left", "saved"), [(7, 4), pytest.param(10, 8, marks=pytest.mark.slow)])
def test_a_run_that_was_left_in_the_middle_ends_with_the_same_bits(
    left: int, saved: int, tmp_path: Path
) -> None:
    task, made = (
        Small(dropout=0.1, norm=True),
        stated("step", checkpoint={"every": "4 steps", "background": False}),
    )
    losses, expected, _ = train(made, task, tmp_path / "unbroken")
    first, _, _ = train(made, task, tmp_path / "broken", steps=left)
    rest, state, _ = train(made, task, tmp_path / "broken")
    assert (first, rest) == (losses[:left], losses[saved:])
    dtypes = [event for event in records(tmp_path / "broken") if isinstance(event, Dtypes)][-1]
    assert {row["gradient"] for row in dtypes.parameters} == {"fp32"}
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
    (fault,) = faults_of(tmp_path / "whole")
    assert fault.detail.startswith("the whole step cannot be compiled")
    assert fault.action == "it runs in eager mode"


@pytest.fixture
def recompile_limit() -> Iterator[int]:
    """How many sizes torch compiles: few here.

    By its own context, since what pytest puts back stays hidden in its configuration.
    """
    with torch._dynamo.config.patch(recompile_limit=1):
        yield 1


def test_a_run_whose_batches_have_more_sizes_than_torch_compiles_goes_on_in_order(
    tmp_path: Path, recompile_limit: int
) -> None:
    # 24 samples: the last batch is smaller
    tables: dict[str, Any] = {
        "train": {"batch": 7},
        "observe": {"every": "1 step"},
        "optim": OPTIMIZERS["sgd"],
    }
    told, _, _ = train(spec(12, **tables), Small(), tmp_path / "told")
    made = spec(12, compile={"what": "step", "dynamic": False}, **tables)
    losses, _, _ = train(made, Small(), tmp_path / "whole")
    assert losses == pytest.approx(told, rel=1e-5)
    (fault,) = faults_of(tmp_path / "whole")
    assert fault.detail.startswith("the whole step cannot be compiled")
    assert fault.action == "it runs in eager mode"
    assert [bool(each.ended_early) for each in graphs(tmp_path / "whole")] == [False, True]


REFUSED: dict[str, dict[str, Any]] = {
    "train.microbatch": {"train": {"microbatch": 2}},
    "update_in_backward": {
        "memory": {"update_in_backward": True},
        "optim": {"clip": 0.0},
        "stability": {"nonfinite": "stop"},
    },
    "memory.activation_checkpointing": {
        "memory": {"activation_checkpointing": "full", "blocks": ["0"]}
    },
    "memory.on_oom": {"memory": {"on_oom": "halve"}},
    "memory.offload": {"memory": {"offload": "optimizer"}},
    "fp16": {"precision": {"compute": "fp16"}},
    "an optimizer is FlatMuon": {"optim": {"name": "muon"}},
    "an optimizer is AdamW without fused": {"optim": {"fused": False}},
    "changes the momentum": {"schedule": {"name": "one_cycle"}},
    "precision.weights": {"precision": {"compute": "bf16", "weights": "bf16", "master": "none"}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_with_it_is_refused_before_anything_is_written(
    what: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(SpecError) as refused,
        Run(stated("step", **REFUSED[what]), Small(), folder=tmp_path / "run", quiet=True),
    ):
        pass
    assert 'compile.what = "step"' in refused.value.message
    assert what in f"{refused.value.message} {refused.value.hint}"
    assert not (tmp_path / "run").exists()


def test_a_run_says_after_how_many_steps_its_compiling_has_paid_for_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = stated("step", steps=40, optim=OPTIMIZERS["plain sgd"])
    with Run(made, Small(), folder=tmp_path / "run") as run:
        for _ in run.steps():
            pass
    said = capsys.readouterr()
    assert "of compilation are " in said.out + said.err
