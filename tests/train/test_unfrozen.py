"""What the reader's loop unfreezes trains from there on, and a resumed run knows of it.

What cannot be trained so is named.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot.contract import events
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import UserCodeError
from surefoot.train.run import Run
from tests.train.small import Small, spec
from tests.train.test_resume import Left

AT = 5  # the step after which something changes
CHECKPOINT = {"every": "5 steps", "background": False}


class Frozen(Small):
    """The first layer is frozen at the start; `own` builds an optimizer of the task's."""

    def __init__(self, own: bool = False, whole: bool = False) -> None:
        super().__init__()
        if own:
            self.optimizer = lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5)
        self.whole = whole

    def model(self) -> nn.Module:
        made = super().model()
        made[0].requires_grad_(self.whole)  # type: ignore[index]
        return made


def run(
    folder: Path, how: RunSpec, task: Any, change: Any, leave_at: int | None = None
) -> tuple[dict[str, str], Any]:
    with Run(how, task, folder=folder, quiet=True) as made:
        for report in made.steps():
            if report.step == AT:
                change(made.model)
            if report.step == leave_at:
                raise Left
        return made.state_digests(), made.model


def unfreeze(model: Any) -> None:
    model[0].requires_grad_(True)


def freeze(model: Any) -> None:
    model[4].bias.requires_grad_(False)


def unfreeze_and_freeze(model: Any) -> None:
    unfreeze(model)
    freeze(model)


HOW = {
    "adamw": (spec(14, checkpoint=CHECKPOINT), Frozen),
    "sgd with momentum": (
        spec(14, optim={"name": "sgd", "momentum": 0.9}, checkpoint=CHECKPOINT),
        Frozen,
    ),
    "muon": (spec(14, optim={"name": "muon"}, checkpoint=CHECKPOINT), Frozen),
    "an average": (spec(14, optim={"ema": 0.9}, checkpoint=CHECKPOINT), Frozen),
    "the task's own": (spec(14, checkpoint=CHECKPOINT), lambda: Frozen(own=True)),
    "frozen by the spec": (
        spec(14, optim={"freeze": ["0.*"], "lr_multipliers": {"4.*": 0.5}}, checkpoint=CHECKPOINT),
        lambda: Frozen(whole=True),
    ),
    "in microbatches": (spec(14, train={"microbatch": 2}, checkpoint=CHECKPOINT), lambda: Small()),
}


@pytest.mark.quick(
    "muon-unfreeze",
    "frozen by the spec-unfreeze",
    "an average-unfreeze_and_freeze",
    "in microbatches-freeze",
)
@pytest.mark.parametrize("change", [unfreeze, freeze, unfreeze_and_freeze])
@pytest.mark.parametrize("how", HOW)
def test_what_the_loop_unfreezes_or_freezes_is_so_after_a_kill_too(
    how: str, change: Any, tmp_path: Path
) -> None:
    stated, make = HOW[how]
    whole, model = run(tmp_path / "whole", stated, make(), change)
    with contextlib.suppress(Left):
        run(tmp_path / "left", stated, make(), change, leave_at=9)
    again, _ = run(tmp_path / "left", stated, make(), lambda model: None)
    assert again == whole
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    if "ema" in stated.optim.model_fields_set:
        return  # an average goes on towards weights that are frozen
    then, last = (surefoot.load(tmp_path / "whole", step, task=make()) for step in (AT, "last"))
    moved = {
        name
        for name, each in then.named_parameters()
        if not torch.equal(each, last.get_parameter(name))
    }
    assert moved == {name for name, _ in last.named_parameters()} - frozen
    assert (change is unfreeze) == (not frozen)


def test_an_unfrozen_layer_takes_the_steps_that_plain_pytorch_takes(tmp_path: Path) -> None:
    def plain() -> list[Tensor]:
        seen: list[Any] = []

        class Watched(Frozen):
            def augment(self, batch: Any, keys: Any) -> Any:
                return batch

            def loss(self, output: Tensor, batch: Any) -> Any:
                if output.requires_grad:
                    seen.append(batch)
                return super().loss(output, batch)

        how = spec(
            10,
            optim={"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "clip": 0.0},
            schedule={"name": "constant"},
        )
        weights: list[Tensor] = []
        with Run(how, Watched(), folder=tmp_path / "a", quiet=True) as made:
            seen.clear()
            model: Any = made.model
            copies = {name: each.detach().clone() for name, each in model.state_dict().items()}
            for report in made.steps():
                if report.step == AT:
                    unfreeze(model)
            weights = [each.detach().clone() for each in model.parameters()]
        other = Watched().model()
        other.load_state_dict(copies)
        batches = seen[:10]
        optimizer = torch.optim.SGD(
            other.parameters(), lr=0.1, momentum=how.optim.momentum, nesterov=how.optim.nesterov
        )
        for number, batch in enumerate(batches, start=1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(other(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if number == AT:
                unfreeze(other)
        return [
            (one - two).abs().max() for one, two in zip(weights, other.parameters(), strict=True)
        ]

    assert max(map(float, plain())) < 1e-5


IN_BACKWARD = {
    "memory": {"update_in_backward": True},
    "optim": {"clip": 0.0},
    "stability": {"nonfinite": "stop"},
}


def add_module(model: Any) -> None:
    model.add_module("late", nn.Linear(3, 3))


def replace_layer(model: Any) -> None:
    model[4] = nn.Linear(8, 3)


def replace_parameter(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.ones(8, 4))


def add_parameter(model: Any) -> None:
    model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))


CHANGES = [
    (add_module, "late.weight"),
    (replace_layer, "4.weight"),
    (replace_parameter, "0.weight"),
    (add_parameter, "0.scale"),
]


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_parameters_that_come_in_training_are_named_before_a_checkpoint_lacks_them(
    change: Any, name: str, tmp_path: Path
) -> None:
    with pytest.raises(UserCodeError, match=name):
        run(tmp_path / "a", spec(14, checkpoint=CHECKPOINT), Small(), change)


@pytest.mark.parametrize(
    "tables", [IN_BACKWARD, {"precision": {"weights": "bf16", "compute": "bf16"}}]
)
def test_a_layer_that_cannot_be_unfrozen_is_named_with_the_reason(
    tables: Any, tmp_path: Path
) -> None:
    (table,) = [key for key in ("memory", "precision") if key in tables]
    with pytest.raises(UserCodeError, match=f"0.weight, 0.bias is unfrozen now.*{table}[.]"):
        run(tmp_path / "a", spec(14, checkpoint=CHECKPOINT, **tables), Frozen(), unfreeze)


def looped(
    folder: Path, *, leave_at: int | None, changes: dict[int, dict[int, bool]]
) -> tuple[list[Tensor], list[bool], list[str]]:
    """A loop of three passes that freezes or unfreezes layers at the start of a pass.

    It is left after so many of its steps.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.randn(12, 4)
    loader = torch.utils.data.DataLoader(
        list(zip(inputs, (inputs[:, 0] > 0).long(), strict=True)), batch_size=4, shuffle=True
    )
    run, done = (
        surefoot.attach(
            model=model, optimizer=optimizer, data=loader, folder=folder, save="5 steps"
        ),
        0,
    )
    for number in range(run.first_pass, 3):
        for layer, trains in changes.get(number, {}).items():
            model[layer].requires_grad_(trains)
        for batch, targets in run.batches():
            loss = nn.functional.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step_done(loss)
            done += 1
            if done == leave_at:
                run.close()
                return [], [], []
    run.close()
    started = [event for event in events.read(folder) if isinstance(event, events.Started)]
    return (
        list(model.parameters()),
        [each.requires_grad for each in model.parameters()],
        list(started[-1].notes),
    )


@pytest.mark.quick("both-8", "two-4")
@pytest.mark.parametrize("leave_at", [4, 6, 8])
@pytest.mark.parametrize(
    "changes",
    [{1: {0: True}}, {1: {0: True, 2: False}}, {1: {2: False}, 2: {0: True}}],
    ids=["one", "two", "both"],
)
def test_a_loop_that_was_left_trains_what_it_trained(
    changes: dict[int, dict[int, bool]], leave_at: int, tmp_path: Path
) -> None:
    whole, flags, _ = looped(tmp_path / "whole", leave_at=None, changes=changes)
    looped(tmp_path / "left", leave_at=leave_at, changes=changes)
    resumed, again, notes = looped(tmp_path / "left", leave_at=None, changes=changes)
    assert again == flags
    assert all(map(torch.equal, resumed, whole))
    assert any(note.startswith("as when the checkpoint was saved, ") for note in notes) == bool(
        leave_at > 3
    )
