"""The optional parts of a task.

Own optimizer and schedule, own state, frozen and tied and unused parameters, and objects.
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
from surefoot import Loss, Run, RunSpec
from surefoot.components.data.sources.arrays import Arrays
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


def test_a_frozen_layer_takes_no_optimizer_memory(tmp_path: Path) -> None:
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
        "1 step", optim={"lr": 0.01, "lr_multipliers": {"0.*": 0.1}}, schedule={"name": "constant"}
    )
    run = train(Plain(), tmp_path / "run", spec)
    steps = [event for event in surefoot.contract.events.read(run.folder) if event.kind == "step"]
    assert sorted(set(steps[0].learning_rates.values())) == pytest.approx([0.001, 0.01])  # type: ignore[attr-defined]


class Own(Plain):
    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(groups, lr=0.02)

    def schedule(self, step: int, total_steps: int) -> float:
        return 1 - step / total_steps


def rates_of(run: Run) -> list[float]:
    steps = [event for event in surefoot.contract.events.read(run.folder) if event.kind == "step"]
    return [next(iter(step.learning_rates.values())) for step in steps]  # type: ignore[attr-defined]


def test_a_tasks_own_optimizer_and_schedule_are_used(tmp_path: Path) -> None:
    run = train(Own(), tmp_path / "run", spec_of("4 steps"))
    assert [type(each).__name__ for each in run.assembly.updates[0].guarded.optimizers] == [
        "RMSprop"
    ]
    assert rates_of(run) == pytest.approx([0.02, 0.015, 0.01, 0.005])


def test_a_rate_that_the_spec_states_overrules_the_tasks_own(tmp_path: Path) -> None:
    assert rates_of(train(Own(), tmp_path / "run", spec_of("4 steps", optim={"lr": 0.4})))[
        0
    ] == pytest.approx(0.4)


def test_a_named_optimizer_and_schedule_overrule_the_tasks_own_also_from_the_runs_own_spec(
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


def test_what_cannot_reach_a_tasks_own_optimizer_or_schedule_is_refused(tmp_path: Path) -> None:
    assert "optim.betas is given, but the task builds the optimizer" in refused(
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
    assert "state() gives 'seen' as a int, which cannot be restored in place" in refused(
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
    assert any("need a task that can be imported" in note for note in started.notes)  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match="was built in a script and cannot be imported"):
        surefoot.load(run.folder)
    model = surefoot.load(run.folder, task=Lost(3))
    torch.testing.assert_close(model.state_dict(), run.model.state_dict(), rtol=0, atol=0)


def test_the_object_given_is_the_one_that_is_recorded(tmp_path: Path) -> None:
    spec = spec_of(task={"use": "digits", "width": 3})
    run = train(Sized(width=5), tmp_path / "run", spec)
    assert run.spec.task.use == find_use(Sized())
    assert run.spec.task.parameters == {"width": 5}


def test_a_folder_of_the_spec_cannot_reach_an_object_that_is_built_already(tmp_path: Path) -> None:
    assert "the task is already built" in refused(
        Kept(), tmp_path, spec_of(data={"folder": str(tmp_path)})
    )


def test_a_spec_without_a_task_is_refused_where_no_object_is_given(tmp_path: Path) -> None:
    assert "the spec names no task" in refused(None, tmp_path)
    with (
        pytest.raises(TaskError, match="must be an object; got the class Plain"),
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
