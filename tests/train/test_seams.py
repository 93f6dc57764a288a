"""New ways to take a step are built beside the step, without a change of step, run or assembly.

Each is thrown away here: a pipeline, a foreign engine, a rewind, a further loss, local steps with
averages, and a monitor of activations. Each trains a toy to the right numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.components.optim.backward import backward
from surefoot.contract.state import StepReport
from surefoot.contract.task import Batch, Loss
from surefoot.runtime.comm.group import Group
from surefoot.train.assemble import assemble
from surefoot.train.run import Run
from surefoot.train.step import LiveUpdate
from surefoot.train.step import parts as kinds
from surefoot.train.step.accumulate import EagerAccumulate
from surefoot.train.step.eager import EagerStep
from surefoot.train.step.parts import StepParts
from surefoot.train.step.program import (
    Applied,
    Gradients,
    Points,
    StepDone,
    StepInput,
    Totals,
    UpdateDone,
    add_terms,
    join_updates,
    make_report,
)
from tests.train.small import Small, spec
from tests.world.ranks import together

STEPS = 12
Make = Callable[[StepParts, Points], Callable[[StepInput], StepReport]]


@contextmanager
def a_kind(make: Make) -> Iterator[None]:
    """Steps are taken in a new way: its line stands first in the list."""
    before = kinds.KINDS
    kinds.KINDS = ((lambda parts: True, make), *before)
    try:
        yield
    finally:
        kinds.KINDS = before


def train(
    task: Any, folder: Path, *, observe: Callable[[Run], object] = lambda run: None, **tables: Any
) -> tuple[list[float], list[Tensor]]:
    """The losses of a short run, and its weights at the end."""
    with Run(spec(STEPS, **tables), task, folder=folder, quiet=True) as run:
        observe(run)
        losses = [float(report.loss or 0.0) for report in run.steps()]
    return losses, [each.detach().clone() for each in run.model.parameters()]


def eager_step(parts: StepParts, points: Points, accumulate: Any) -> EagerStep:
    """The step of the project with other passes."""
    return EagerStep(
        parts.updates,
        accumulate,
        kinds.make_apply(parts, points),
        clock=parts.clock,
        collectives=parts.collectives,
        buffers=parts.buffers,
        points=points,
    )


# ---- a pipeline that runs all microbatches itself


@dataclass
class TwoStages:
    """All forward passes of the first stage, then of the second; backward in reverse order."""

    eager: EagerAccumulate
    order: list[str]

    def __call__(self, update: LiveUpdate, index: int, given: StepInput) -> Gradients:
        update.guarded.clear_gradients()
        division, model, totals = self.eager.divide(update, given), self.eager.model, Totals()
        first, second = model[:2], model[2:]
        sent, losses = [], []
        for number, batch in enumerate(given.batches):
            self.order.append(f"first {number}")
            sent.append(first(batch[0]))
        received = [each.detach().requires_grad_() for each in sent]
        for number, (rows, batch) in enumerate(zip(received, given.batches, strict=True)):
            self.order.append(f"second {number}")
            total = F.cross_entropy(second(rows), batch[1], reduction="sum")
            losses.append(Loss.sum(total, len(batch[1])))
        for loss, rows, output in reversed(list(zip(losses, received, sent, strict=True))):
            backward([loss.terms[0].total], self.eager.factors_of(loss, division, given))
            output.backward(rows.grad)  # type: ignore[no-untyped-call]
            add_terms(totals, loss.terms)
        return Gradients(totals, division.scale)


def test_a_pipeline_runs_all_microbatches_itself(tmp_path: Path) -> None:
    order: list[str] = []
    cut = {"train": {"microbatch": 2}}
    expected = train(Small(), tmp_path / "eager", **cut)
    with a_kind(
        lambda parts, points: eager_step(
            parts, points, TwoStages(kinds.make_passes(parts, points), order)
        )
    ):
        found = train(Small(), tmp_path / "pipeline", **cut)
    assert order[:4] == ["first 0", "first 1", "second 0", "second 1"]
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(found[1], expected[1])


# ---- a foreign engine that owns the optimizer and the step


class Foreign:
    """An engine in the manner of DeepSpeed: `backward(loss)` and `step()` are its own."""

    def __init__(self, parts: StepParts) -> None:
        self._parts, (self._update,) = parts, parts.updates
        self._optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.05)

    def __call__(self, given: StepInput) -> StepReport:
        (batch,) = given.batches
        loss = self._update.loss(self._parts.model, batch)
        (term,) = loss.terms
        self._optimizer.zero_grad()
        (term.total / term.count).backward()
        self._optimizer.step()
        totals: Totals = {}
        add_terms(totals, loss.terms)
        done = join_updates(
            given, [UpdateDone(self._update, Gradients(totals), Applied(None, True))]
        )
        return make_report(done, given.num_samples, [self._update.name])


def test_a_foreign_engine_owns_the_optimizer_and_the_step(tmp_path: Path) -> None:
    tables = {
        "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.0, "clip": 0.0, "weight_decay": 0.0}
    }
    tables |= {"schedule": {"name": "constant"}}
    expected = train(Small(), tmp_path / "eager", **tables)
    with a_kind(lambda parts, points: Foreign(parts)):
        found = train(Small(), tmp_path / "foreign", **tables)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(found[1], expected[1])
    assert (tmp_path / "foreign" / "checkpoints" / f"step-{STEPS:012d}").is_dir()


# ---- a rewind to a snapshot


class Rewinding:
    """A step whose loss is far above the ones before goes back to the weights of a snapshot."""

    def __init__(self, parts: StepParts, step: EagerStep) -> None:
        self._model, self._step, self.rewound = parts.model, step, list[int]()
        self._best, self._kept = float("inf"), copy.deepcopy(parts.model.state_dict())

    def __call__(self, given: StepInput) -> StepReport:
        report = self._step(given)
        loss = float(report.loss or 0.0)
        if loss > 10 * self._best:
            self._model.load_state_dict(self._kept)
            self.rewound.append(given.number)
        else:
            self._best, self._kept = loss, copy.deepcopy(self._model.state_dict())
        return report


class Spoiled(Small):
    """Somebody spoils the weights after step 5."""

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + model.training
        if model.training and self.calls == 6:
            with torch.no_grad():
                model[0].weight.mul_(1e4)  # type: ignore[index,union-attr]
        return super().forward(model, batch)


def test_a_step_goes_back_to_a_snapshot(tmp_path: Path) -> None:
    made: list[Rewinding] = []

    def make(parts: StepParts, points: Points) -> Rewinding:
        made.append(Rewinding(parts, eager_step(parts, points, kinds.make_passes(parts, points))))
        return made[-1]

    with a_kind(make):
        losses, _ = train(Spoiled(), tmp_path / "run")
    (program,) = made
    assert len(program.rewound) == 1
    number = program.rewound[0]
    assert losses[number - 1] > 10 * losses[number - 2]
    assert max(losses[number:]) < 2 * losses[0]


# ---- a loss that another room adds


def with_decay(update: LiveUpdate, rate: float) -> LiveUpdate:
    """The loss of the task, and a penalty on the weights that counts once a step."""

    def loss(model: Any, batch: Batch) -> Loss:
        made = update.loss(model, batch)
        penalty = sum(each.square().sum() for each in model.parameters() if each.ndim > 1)
        return Loss(
            *made.terms,
            replace(made.terms[0], name="penalty", total=penalty, count=1.0, weight=rate),
        )

    return replace(update, loss=loss)


def test_another_room_adds_a_loss(tmp_path: Path) -> None:
    sgd = {"optim": {"name": "sgd", "lr": 0.05, "momentum": 0.0, "clip": 0.0, "weight_decay": 0.02}}
    sgd |= {"schedule": {"name": "constant"}}
    expected = train(Small(), tmp_path / "decay", **sgd)
    sgd["optim"]["weight_decay"] = 0.0

    def make(parts: StepParts, points: Points) -> EagerStep:
        passes = kinds.make_passes(parts, points)
        return eager_step(
            parts,
            points,
            lambda update, index, given: passes(with_decay(update, 0.01), index, given),
        )

    with a_kind(make):
        found = train(Small(), tmp_path / "penalty", **sgd)
    torch.testing.assert_close(found[1], expected[1])


# ---- local steps, and an average of the ranks every few steps


def test_ranks_take_local_steps_and_average_their_weights(tmp_path: Path) -> None:
    every = 3

    def job(group: Group) -> dict[str, Any]:
        assembly = assemble(spec(STEPS, train={"seed": 0}), Small())
        model, steps = assembly.model, assembly.engine.steps
        apart: list[bool] = []

        def average(done: StepDone) -> None:
            if done.given.number % every:
                return
            with torch.no_grad():
                for each in model.parameters():
                    rows = group.gather(each.detach())
                    apart.append(not torch.equal(rows[0], rows[1]))
                    each.copy_(rows.mean(0))

        steps.observers.published.append(average)
        with torch.no_grad():  # the ranks begin apart, and so their first steps are apart
            for each in model.parameters():
                each.add_(0.01 * group.rank)
        step = steps.step_function()
        for number in range(1, STEPS + 1):
            step(number)
        return {"weights": [each.tolist() for each in model.parameters()], "apart": apart}

    one, other = together(2, job, tmp_path)
    assert one["weights"] == other["weights"]
    assert any(one["apart"])


# ---- a monitor of activations


def test_a_monitor_sees_the_activations_of_each_microbatch(tmp_path: Path) -> None:
    norms: list[tuple[int, int, float]] = []
    seen: list[float] = []

    def observe(run: Run) -> None:
        layer = run.model.get_submodule("0")
        layer.register_forward_hook(
            lambda module, rows, output: seen.append(float(output.detach().norm()))
        )
        run.assembly.engine.steps.observers.microbatch_done.append(
            lambda update, given, position, totals: norms.append((given.number, position, seen[-1]))
        )

    cut = {"train": {"microbatch": 2}}
    plain = train(Small(), tmp_path / "plain", **cut)
    watched = train(Small(), tmp_path / "watched", observe=observe, **cut)
    assert [row[:2] for row in norms] == [(n, p) for n in range(1, STEPS + 1) for p in range(2)]
    assert all(norm > 0 for _, _, norm in norms)
    assert watched[0] == plain[0]
    assert all(map(torch.equal, watched[1], plain[1]))
