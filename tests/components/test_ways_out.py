"""A state that does not fit says what makes it fit, and what it says leads out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.components import checkpoint
from surefoot.core.errors import RunFolderError


def built() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def inside(model: nn.Module) -> nn.Module:
    """The same with one layer compiled."""
    model[1] = torch.compile(model[1])  # type: ignore[index,operator]
    return model


def save(folder: Path, **state: Any) -> None:
    checkpoint.save(folder, 1, state)


WRAPPED = (
    "the checkpoint is of a model wrapped by torch.compile: "
    "wrap the same part of the model first, as model = torch.compile(model)"
)
PLAIN = (
    "the checkpoint is of a model not wrapped by torch.compile: give the model itself, "
    "which is model._orig_mod"
)


@pytest.mark.parametrize("how", ["load", "load_into"])
def test_weights_of_a_model_that_was_compiled_say_so_and_fit_when_it_is(
    how: str, tmp_path: Path
) -> None:
    def read(model: nn.Module) -> None:
        checkpoint.load(tmp_path, {"model": model}, 1) if how == "load" else checkpoint.load_into(
            model, tmp_path, 1
        )

    compiled: Any = torch.compile(built())
    save(tmp_path, model=compiled)
    with pytest.raises(RunFolderError) as refused:
        read(built())
    assert refused.value.hint == WRAPPED
    read(torch.compile(built()))


@pytest.mark.parametrize("how", ["load", "load_into"])
def test_weights_of_a_model_that_was_not_compiled_say_so_and_fit_the_model_itself(
    how: str, tmp_path: Path
) -> None:
    def read(model: nn.Module) -> None:
        checkpoint.load(tmp_path, {"model": model}, 1) if how == "load" else checkpoint.load_into(
            model, tmp_path, 1
        )

    save(tmp_path, model=built())
    compiled: Any = torch.compile(built())
    with pytest.raises(RunFolderError) as refused:
        read(compiled)
    assert refused.value.hint == PLAIN
    read(compiled._orig_mod)


def test_a_layer_that_was_compiled_and_another_model_are_told_apart(tmp_path: Path) -> None:
    save(tmp_path, model=inside(built()))
    with pytest.raises(RunFolderError) as refused:
        checkpoint.load_into(built(), tmp_path, 1)
    assert refused.value.hint == WRAPPED
    for other in (nn.Linear(3, 4), torch.compile(nn.Linear(3, 4))):
        with pytest.raises(RunFolderError) as refused:
            checkpoint.load_into(other, tmp_path, 1)
        assert refused.value.hint == "build the model with the parameters that the run had"


def attach(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    return surefoot.attach(
        model=model, optimizer=optimizer, data=[torch.ones(2, 3)] * 4, folder=folder, save="1 steps"
    )


def test_an_attached_loop_resumes_with_and_without_compile_as_the_hint_says(tmp_path: Path) -> None:
    model: Any = torch.compile(built())
    with attach(tmp_path / "a", model, torch.optim.SGD(model.parameters(), 0.1)) as run:
        next(run.batches())
        run.step_done(torch.tensor(1.0))
        run.save()
    plain = built()
    with pytest.raises(RunFolderError) as refused:
        attach(tmp_path / "a", plain, torch.optim.SGD(plain.parameters(), 0.1))
    assert refused.value.hint == WRAPPED
    again: Any = torch.compile(plain)
    attach(tmp_path / "a", again, torch.optim.SGD(again.parameters(), 0.1)).close()


def unfrozen(folder: Path) -> None:
    """A loop that adds a group of parameters when it unfreezes a layer."""
    model = built()
    optimizer = torch.optim.AdamW(model[1].parameters(), 0.1)  # type: ignore[index]
    with attach(folder, model, optimizer) as run:
        for number, batch in enumerate(run.batches()):
            if number == 2:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})  # type: ignore[index]
            loss = model(batch).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_done(loss)


def test_groups_that_were_added_in_training_are_added_before_a_loop_is_resumed(
    tmp_path: Path,
) -> None:
    unfrozen(tmp_path / "a")
    model = built()
    optimizer = torch.optim.AdamW(model[1].parameters(), 0.1)  # type: ignore[index]
    with pytest.raises(
        RunFolderError, match=r"for groups of \[2, 2\] parameters, and this optimizer has \[2\]"
    ) as refused:
        attach(tmp_path / "a", model, optimizer)
    assert (
        "needs 1 more of the groups that were added during training: add them first, in the same "
        "order, with optimizer.add_param_group(...)" in str(refused.value.hint)
    )
    optimizer.add_param_group({"params": list(model[0].parameters())})  # type: ignore[index]
    attach(tmp_path / "a", model, optimizer).close()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert len(optimizer.state) == 4


def test_a_frozen_layer_of_a_group_does_not_move() -> None:
    model = built()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, built()[0].weight)  # type: ignore[index]


def test_other_groups_are_refused_without_that_way(tmp_path: Path) -> None:
    model = built()
    save(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    halves = torch.optim.SGD([{"params": part.parameters()} for part in model.children()], 0.1)
    with pytest.raises(
        RunFolderError, match=r"for groups of \[4\] parameters, and this optimizer has \[2, 2\]"
    ) as refused:
        checkpoint.load(tmp_path, {"model": model, "optimizer": halves}, 1)
    assert refused.value.hint == "pass an object of the type that was saved, or leave it out"
