"""Tasks of several updates: which parameters each moves, when, and by which optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot import Loss, Run, Update
from surefoot.components.metrics import Mean, accuracy
from surefoot.core.errors import InputError
from tests.train.test_contract_parts import Batch, Plain, refused, spec_of, train

# ---- updates


class TwoUpdates(Plain):
    """A body and a head, each with an update of its own."""

    body_every = 1
    left_out: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        return nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, 3)})

    def forward(self, model: Any, batch: Batch) -> Tensor:
        output: Tensor = model["head"](model["body"](batch[0]).relu())
        return output

    def updates(self, model: Any) -> list[Update]:
        named = {"body": self.body_every, "head": 1}
        return [
            Update(
                name,
                self.one,
                [p for n, p in model[name].named_parameters() if n not in self.left_out],
                every=every,
            )
            for name, every in named.items()
        ]

    def one(self, model: Any, batch: Batch) -> Loss:
        return self.loss(self.forward(model, batch), batch)


class OnlyUpdates:
    """What a task of updates needs at least.

    `metrics` and `forward` come when it is to be evaluated.
    """

    def __init__(self) -> None:
        self.inner = TwoUpdates()
        self.model, self.data, self.updates = self.inner.model, self.inner.data, self.inner.updates


class Measured(OnlyUpdates):
    def metrics(self, output: Tensor, batch: Batch) -> dict[str, Mean]:
        return {"accuracy": accuracy(output, batch[1])}


class Forwarded(Measured):
    def forward(self, model: Any, batch: Batch) -> Tensor:
        return self.inner.forward(model, batch)


def test_a_task_of_updates_trains_without_forward_and_is_evaluated_once_it_has_one(
    tmp_path: Path,
) -> None:
    assert train(OnlyUpdates(), tmp_path / "bare").summary["value"] is None
    assert 0 <= train(Forwarded(), tmp_path / "forward").summary["value"] <= 1
    assert "task Measured has no method forward" in refused(Measured(), tmp_path)


def test_each_update_moves_its_own_parameters_and_leaves_no_gradient_in_the_others(
    tmp_path: Path,
) -> None:
    task = TwoUpdates()
    task.body_every = 3
    with Run(spec_of(), task, folder=tmp_path / "run", quiet=True) as run:
        moved = []
        before = run.model["body"].weight.detach().clone()
        for _ in run.steps():
            moved.append(not torch.equal(before, run.model["body"].weight))
            before = run.model["body"].weight.detach().clone()
    assert moved == [False, False, True, False, False, True]


def test_an_update_of_every_third_step_stands_where_the_run_does_on_its_schedule(
    tmp_path: Path,
) -> None:
    task = TwoUpdates()
    task.body_every = 3
    seen = {}
    with Run(
        spec_of("9 steps", optim={"lr": 1.0}, schedule={"name": "linear"}),
        task,
        folder=tmp_path / "run",
        quiet=True,
    ) as run:
        for report in run.steps():
            seen[report.step] = [update.guarded.groups[0]["lr"] for update in run.assembly.updates]
    assert all(seen[step][0] == seen[step][1] for step in (3, 6, 9))
    assert seen[9][1] == pytest.approx(1 / 9)


def test_a_pattern_may_mean_the_parameters_of_one_update_and_must_mean_some(tmp_path: Path) -> None:
    run = train(
        TwoUpdates(),
        tmp_path / "run",
        spec_of(optim={"lr": 0.01, "lr_multipliers": {"head.*": 4.0}}),
    )
    rates = [{group["rate"] for group in update.guarded.groups} for update in run.assembly.updates]
    assert rates == [{1.0}, {4.0}]
    assert "matches no parameter" in refused(
        TwoUpdates(), tmp_path, spec_of(optim={"lr_multipliers": {"tail.*": 4.0}})
    )


def test_a_parameter_of_no_update_is_refused_and_a_frozen_one_is_not(tmp_path: Path) -> None:
    task = TwoUpdates()
    task.left_out = ("bias",)
    assert "2 trained parameters are in no group, the first is body.bias" in refused(task, tmp_path)
    train(task, tmp_path / "frozen", spec_of(optim={"freeze": ["*.bias"]}))


class OtherParameters(TwoUpdates):
    def updates(self, model: Any) -> list[Update]:
        body, head = super().updates(model)
        return [
            body,
            Update(
                "head",
                head.loss,
                head.parameters,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            ),
        ]


def test_an_update_whose_optimizer_holds_other_parameters_is_refused(tmp_path: Path) -> None:
    assert (
        "update head names 2 parameters, but its optimizer holds 4; they must be the same"
        in refused(OtherParameters(), tmp_path)
    )


class OwnOptimizers(TwoUpdates):
    def updates(self, model: Any) -> list[Update]:
        return [
            Update(
                each.name,
                each.loss,
                each.parameters,
                optimizer=torch.optim.SGD(each.parameters, lr=0.1),
            )
            for each in super().updates(model)
        ]


def test_two_updates_with_own_optimizers_train_where_some_parameters_are_frozen(
    tmp_path: Path,
) -> None:
    run = train(OwnOptimizers(), tmp_path / "run", spec_of(optim={"freeze": ["body.weight"]}))
    assert run.outcome == "finished"


class Steep(TwoUpdates):
    """A gradient penalty differentiates inside the loss."""

    def one(self, model: Any, batch: Batch) -> Loss:
        inputs = batch[0].detach().requires_grad_()
        output = self.forward(model, (inputs, batch[1]))
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return Loss.sum(
            F.cross_entropy(output, batch[1], reduction="sum") + slope.square().sum(), len(output)
        )


def test_a_loss_that_differentiates_by_itself_trains(tmp_path: Path) -> None:
    assert train(Steep(), tmp_path / "run").outcome == "finished"


# ---- own optimizer and schedule


class EveryThird(Plain):
    """One update alone, in every third step."""

    def updates(self, model: nn.Module) -> list[Update]:
        return [
            Update(
                "only",
                lambda net, batch: self.loss(self.forward(net, batch), batch),
                model.parameters(),
                every=3,
            )
        ]


def test_a_step_without_an_update_has_no_loss_and_is_no_reference_for_divergence(
    tmp_path: Path,
) -> None:
    with Run(spec_of("90 steps"), EveryThird(), folder=tmp_path / "run", quiet=True) as run:
        losses = [report.loss for report in run.steps()]
    assert [loss is None for loss in losses[:6]] == [True, True, False, True, True, False]
    assert run.outcome == "finished"


def test_the_gradient_noise_is_that_of_the_steps_with_an_update(tmp_path: Path) -> None:
    noisy = spec_of("30 steps").replace(observe={"noise": True}, train={"microbatch": 2})
    with Run(noisy, EveryThird(), folder=tmp_path / "run", quiet=True) as run:
        assert len(list(run.steps())) == 30
    assert run.summary["noise"]["num_steps"] == 10


def test_a_run_that_was_not_opened_has_no_outcome(tmp_path: Path) -> None:
    run = Run(spec_of("3 steps"), EveryThird(), folder=tmp_path / "run", quiet=True)
    assert (run.outcome, run.cause, run.exit_code, run.summary) == ("", "", 0, {})
    assert (run.step, run.num_samples, run.training_s) == (0, 0, 0.0)
    with pytest.raises(InputError, match="not open"):
        _ = run.model


class Quadratic(Plain):
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([parameter for group in groups for parameter in group["params"]])


def test_an_optimizer_that_computes_the_loss_by_itself_is_refused(tmp_path: Path) -> None:
    assert "LBFGS calls the loss several times" in refused(Quadratic(), tmp_path)
