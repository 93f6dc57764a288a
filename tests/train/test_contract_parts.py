"""The optional parts of a task.

Updates, own optimiser and schedule, own state, frozen and tied and unused parameters, and objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot
from surefoot import Loss, Run, RunSpec, Update
from surefoot.components.data import Arrays
from surefoot.components.metrics import Mean, accuracy
from surefoot.contract import spec_file
from surefoot.contract.task import find_arguments, find_use
from surefoot.core.errors import InputError, SpecError, TaskError

Batch = tuple[Tensor, Tensor]


class Plain:
    """Four numbers, three classes, 32 samples."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def data(self, split: str) -> Arrays:
        inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(int(split == "train")))
        return Arrays(inputs, inputs[:, :3].argmax(1))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(output))


def spec_of(length: str = "6 steps", **tables: Any) -> RunSpec:
    train = {"length": length, "batch": 16, **tables.pop("train", {})}
    return RunSpec(train=train, observe={"tensorboard": False, "every": "1 step"}, **tables)


def train(task: Any, folder: Path, spec: RunSpec | None = None) -> Run:
    with Run(spec or spec_of(), task, folder=folder, quiet=True) as run:
        for _ in run.steps():
            pass
        if run.is_stopping is None or run.step:
            run.evaluate()
    return run


def refused(task: Any, folder: Path, spec: RunSpec | None = None) -> str:
    """What the run says when it is refused; nothing may have been written."""
    with (
        pytest.raises(InputError) as told,
        Run(spec or spec_of(), task, folder=folder / "refused", quiet=True),
    ):
        pass
    assert not (folder / "refused").exists()
    return str(told.value)


# ---- parameters


class Patchwork(Plain):
    """A frozen layer, a head tied to it, and a parameter that nothing uses."""

    def model(self) -> nn.Module:
        model = nn.ModuleDict(
            {
                "first": nn.Linear(4, 4),
                "second": nn.Linear(4, 4),
                "idle": nn.Linear(4, 4),
                "out": nn.Linear(4, 3),
            }
        )
        model["second"].weight = (
            model["out_tied"].weight if "out_tied" in model else model["second"].weight
        )
        model["again"] = nn.Linear(4, 4)
        model["again"].weight = model["second"].weight
        return model

    def forward(self, model: Any, batch: Batch) -> Tensor:
        hidden = model["again"](model["second"](model["first"](batch[0])).relu())
        output: Tensor = model["out"](hidden)
        return output


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_frozen_and_unused_parameters_stay_bitwise_and_tied_ones_move_once(
    optimizer: str, tmp_path: Path
) -> None:
    spec = spec_of(optim={"name": optimizer, "lr": 0.01, "freeze": ["first.*"]})
    with Run(spec, Patchwork(), folder=tmp_path / "run", quiet=True) as run:
        before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        for _ in run.steps():
            pass
        after = run.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {
        "second.weight",
        "second.bias",
        "again.weight",
        "again.bias",
        "out.weight",
        "out.bias",
    }
    assert after["second.weight"].data_ptr() == after["again.weight"].data_ptr()
    (update,) = run.assembly.updates
    held = [id(parameter) for parameter in update.guarded.parameters]
    assert len(held) == len(set(held)) == 7  # the tied matrix once, first.* not at all
    parameters = dict(run.model.named_parameters())
    assert not {id(parameters["first.weight"]), id(parameters["first.bias"])} & set(held)
    with_state = {id(key) for each in update.guarded.optimizers for key in each.state}
    assert id(parameters["first.weight"]) not in with_state


def test_a_frozen_layer_takes_no_optimiser_memory(tmp_path: Path) -> None:
    def state_bytes(run: Run) -> int:
        states = [
            state
            for each in run.assembly.updates[0].guarded.optimizers
            for state in each.state.values()
        ]
        return sum(
            t.numel() * t.element_size()
            for state in states
            for t in state.values()
            if isinstance(t, Tensor) and t.ndim
        )

    whole = state_bytes(train(Plain(), tmp_path / "whole"))
    half = state_bytes(train(Plain(), tmp_path / "half", spec_of(optim={"freeze": ["0.*"]})))
    assert (whole, half) == (2 * 4 * (4 * 8 + 8 + 8 * 3 + 3), 2 * 4 * (8 * 3 + 3))


def test_multipliers_of_the_rate_stand_in_the_log_of_each_group(tmp_path: Path) -> None:
    spec = spec_of(
        "1 step", optim={"lr": 0.01, "rates": {"0.*": 0.1}}, schedule={"name": "constant"}
    )
    run = train(Plain(), tmp_path / "run", spec)
    steps = [event for event in surefoot.contract.events.read(run.folder) if event.kind == "step"]
    assert sorted(set(steps[0].learning_rates.values())) == pytest.approx([0.001, 0.01])  # type: ignore[attr-defined]


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
        TwoUpdates(), tmp_path / "run", spec_of(optim={"lr": 0.01, "rates": {"head.*": 4.0}})
    )
    rates = [{group["rate"] for group in update.guarded.groups} for update in run.assembly.updates]
    assert rates == [{1.0}, {4.0}]
    assert "matches no parameter" in refused(
        TwoUpdates(), tmp_path, spec_of(optim={"rates": {"tail.*": 4.0}})
    )


def test_a_parameter_of_no_update_is_refused_and_a_frozen_one_is_not(tmp_path: Path) -> None:
    task = TwoUpdates()
    task.left_out = ("bias",)
    assert "2 trained parameters stand in no group, the first is body.bias" in refused(
        task, tmp_path
    )
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


def test_an_update_whose_optimiser_holds_other_parameters_is_refused(tmp_path: Path) -> None:
    assert "update head names 2 parameters, its optimiser holds 4, not the same ones" in refused(
        OtherParameters(), tmp_path
    )


class OwnOptimisers(TwoUpdates):
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


def test_two_updates_with_own_optimisers_train_where_some_parameters_are_frozen(
    tmp_path: Path,
) -> None:
    run = train(OwnOptimisers(), tmp_path / "run", spec_of(optim={"freeze": ["body.weight"]}))
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


# ---- own optimiser and schedule


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


class Quadratic(Plain):
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([parameter for group in groups for parameter in group["params"]])


def test_an_optimiser_that_computes_the_loss_by_itself_is_refused(tmp_path: Path) -> None:
    assert "LBFGS calls the loss several times" in refused(Quadratic(), tmp_path)


class Own(Plain):
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(groups, lr=0.02)

    def schedule(self, step: int, total_steps: int) -> float:
        return 1 - step / total_steps


def rates_of(run: Run) -> list[float]:
    steps = [event for event in surefoot.contract.events.read(run.folder) if event.kind == "step"]
    return [next(iter(step.learning_rates.values())) for step in steps]  # type: ignore[attr-defined]


def test_a_tasks_own_optimiser_and_schedule_are_used(tmp_path: Path) -> None:
    run = train(Own(), tmp_path / "run", spec_of("4 steps"))
    assert [type(each).__name__ for each in run.assembly.updates[0].guarded.optimizers] == [
        "RMSprop"
    ]
    assert rates_of(run) == pytest.approx([0.02, 0.015, 0.01, 0.005])


def test_a_rate_that_the_spec_states_overrules_the_tasks_own(tmp_path: Path) -> None:
    assert rates_of(train(Own(), tmp_path / "run", spec_of("4 steps", optim={"lr": 0.4})))[
        0
    ] == pytest.approx(0.4)


def test_a_named_optimiser_and_schedule_overrule_the_tasks_own_also_from_the_runs_own_spec(
    tmp_path: Path,
) -> None:
    spec = spec_of("4 steps", optim={"name": "adamw"}, schedule={"name": "cosine"})
    run = train(Own(), tmp_path / "run", spec)
    again = spec_file.read(str(run.folder / "spec.toml")).spec
    assert (again.optim.model_fields_set, "schedule" in again.model_fields_set) == ({"name"}, True)
    repeated = train(Own(), tmp_path / "again", again)
    kinds = [type(each).__name__ for each in repeated.assembly.updates[0].guarded.optimizers]
    assert kinds == ["AdamW"]
    assert rates_of(repeated) == rates_of(run)


def test_what_cannot_reach_a_tasks_own_optimiser_or_schedule_is_refused(tmp_path: Path) -> None:
    assert "optim.betas is given, but the optimiser is the task's own" in refused(
        Own(), tmp_path, spec_of(optim={"betas": [0.5, 0.9]})
    )
    assert "needs the number of steps" in refused(Own(), tmp_path, spec_of("1 min"))


# ---- own state


class Counting(Plain):
    """Counts the samples that its loss has seen, three ways."""

    def __init__(self) -> None:
        self.in_tensor, self.in_array, self.average = (
            torch.zeros(()),
            np.zeros(1),
            nn.Linear(1, 1, bias=False),
        )
        nn.init.zeros_(self.average.weight)

    def state(self) -> dict[str, Any]:
        return {"tensor": self.in_tensor, "array": self.in_array, "object": self.average}

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        self.in_tensor += len(output)
        self.in_array += len(output)
        self.average.weight.data += len(output)
        return super().loss(output, batch)

    def seen(self) -> list[float]:
        return [float(self.in_tensor), float(self.in_array[0]), self.average.weight.item()]


def test_a_tasks_own_state_sees_training_alone(tmp_path: Path) -> None:
    task = Counting()
    with Run(spec_of("4 steps"), task, folder=tmp_path / "run", quiet=True) as run:
        assert task.seen() == [0, 0, 0]  # trying the contract left nothing
        for report in run.steps():
            run.evaluate()
            assert task.seen() == [16.0 * report.step] * 3


class Forgetful(Plain):
    def state(self) -> dict[str, Any]:
        return {"seen": 3}


def test_a_state_that_cannot_be_put_back_is_refused(tmp_path: Path) -> None:
    assert "state() gives 'seen' as a int, which cannot be put back in place" in refused(
        Forgetful(), tmp_path
    )


# ---- augmentation is part of what is tried


class BadAugment(Plain):
    def augment(self, batch: Batch, keys: Any) -> Batch:
        raise ValueError("no such crop")


def test_an_augmentation_that_fails_is_told_before_the_run(tmp_path: Path) -> None:
    assert "no such crop" in refused(BadAugment(), tmp_path)


# ---- objects, dataclasses, subclasses


@dataclass
class Sized(Plain):
    width: int = 8
    names: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.width), nn.ReLU(), nn.Linear(self.width, 3))


class Kept(Plain):
    def __init__(self, width: int = 8, folder: str | None = None) -> None:
        self.width, self.folder = width, folder


class Lost(Plain):
    def __init__(self, width: int) -> None:
        self.twice = 2 * width


def test_arguments_are_known_where_they_are_kept_under_their_names() -> None:
    assert find_arguments(Sized(width=3)) == {"width": 3}
    assert find_arguments(Sized()) == {}
    assert find_arguments(Kept(folder="here")) == {"folder": "here"}
    assert find_arguments(Plain()) == {}
    assert find_arguments(Lost(3)) is None


def test_an_object_built_in_a_script_makes_a_spec_that_repeats_the_run(tmp_path: Path) -> None:
    run = train(Sized(width=5), tmp_path / "run")
    again = spec_file.read(str(run.folder / "spec.toml")).spec
    assert (again.task.use, again.task.parameters) == (find_use(Sized()), {"width": 5})
    repeated = train(None, tmp_path / "again", again)
    torch.testing.assert_close(repeated.model.state_dict(), run.model.state_dict(), rtol=0, atol=0)
    assert isinstance(surefoot.load(run.folder), nn.Module)


def test_an_object_that_cannot_be_built_anew_trains_and_says_what_it_cannot(tmp_path: Path) -> None:
    run = train(Lost(3), tmp_path / "run")
    started = next(iter(surefoot.contract.events.read(run.folder)))
    assert any("needs one that can be imported" in note for note in started.notes)  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match="was built in place and cannot be imported"):
        surefoot.load(run.folder)
    model = surefoot.load(run.folder, task=Lost(3))
    torch.testing.assert_close(model.state_dict(), run.model.state_dict(), rtol=0, atol=0)


def test_the_object_given_is_the_one_that_is_recorded(tmp_path: Path) -> None:
    spec = spec_of(task={"use": "digits", "width": 3})
    run = train(Sized(width=5), tmp_path / "run", spec)
    assert run.spec.task.use == find_use(Sized())
    assert run.spec.task.parameters == {"width": 5}


def test_a_folder_of_the_spec_cannot_reach_an_object_that_is_built_already(tmp_path: Path) -> None:
    assert "the task is built already" in refused(
        Kept(), tmp_path, spec_of(data={"folder": str(tmp_path)})
    )


def test_a_spec_without_a_task_is_refused_where_no_object_is_given(tmp_path: Path) -> None:
    assert "the spec names no task" in refused(None, tmp_path)
    with (
        pytest.raises(TaskError, match="is the class Plain, not an object"),
        Run(spec_of(), Plain, folder=tmp_path / "run", quiet=True),
    ):
        pass


NOTEBOOK = """
from surefoot import Run, RunSpec
from surefoot.tasks.digits import Digits

class Mine(Digits):
    pass

spec = RunSpec(train={"length": "2 steps"}, observe={"tensorboard": False})
with Run(spec, Mine(width=4), folder=folder, quiet=True) as run:
    for _ in run.steps():
        pass
"""


def test_a_task_of_a_notebook_trains_with_nothing_to_import_it_by(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs the extra demo")
    # a module that no file holds and no process can import
    cells = {"__name__": "notebook", "folder": tmp_path / "run"}
    exec(compile(NOTEBOOK, "<cell>", "exec"), cells)
    run = cells["run"]
    assert isinstance(run, Run)
    assert (run.spec.task.use, run.outcome) == (None, "finished")


SUBCLASS = """
from surefoot.tasks.digits import Digits

class Narrow(Digits):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width=width, shift=0)
"""


def test_a_subclass_of_a_built_in_task_is_checked_against_its_own_constructor(
    tmp_path: Path,
) -> None:
    pytest.importorskip("sklearn", reason="needs the extra demo")
    (tmp_path / "mine.py").write_text(SUBCLASS)
    use = f"{tmp_path / 'mine.py'}:Narrow"
    with pytest.raises(SpecError, match="has no parameter 'shift'"):
        spec_file.read(use, [("task.shift", 1, "--set task.shift")])
    spec = spec_file.read(
        use, [("task.width", 3, "--set task.width"), ("train.length", "2 steps", "--steps")]
    ).spec
    assert train(None, tmp_path / "run", spec).model[0].out_channels == 3
