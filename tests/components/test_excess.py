"""What no checkpoint can hold is refused by its own name.

Before a run, a loop or an import writes what no reader would take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import surefoot
from surefoot.components import checkpoint
from surefoot.components.checkpoint import foreign
from surefoot.contract import manifest
from surefoot.core.errors import InputError, TaskError
from surefoot.train.run import Run
from tests.prove.forked import programs_are_forked
from tests.train.small import Small, spec

__all__ = ["programs_are_forked"]

DEEP = (1,) * 1000


@pytest.mark.quick("safetensors")
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.usefixtures("programs_are_forked")
def test_an_import_names_the_tensor_that_no_checkpoint_holds(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    held = {"deep": torch.ones(DEEP), "wide": torch.ones(0, 1 << 30, 1 << 20), "w": torch.ones(3)}
    save_file(held, path) if ending == "safetensors" else torch.save(held, path)
    found = foreign.open_foreign(path)
    assert list(found.tensors) == ["w"]
    with pytest.raises(
        InputError, match=r"deep \(a tensor of 1,000 dimensions, more than 64, which a checkpoint"
    ) as refused:
        foreign.choose_weights(found)
    assert "wide (a tensor of 1,125,899,906,842,624 elements" in refused.value.message
    assert "manifest" not in str(refused.value)


def test_more_tensors_than_a_manifest_holds_are_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_NESTED", 100)
    with pytest.raises(TaskError, match="there are more tensors than a checkpoint can store"):
        checkpoint.save(tmp_path, 1, {f"t{number}": torch.ones(1) for number in range(40)})
    assert manifest.steps(tmp_path) == []
    assert list(tmp_path.rglob("*.safetensors")) == []


def attached(folder: Path, **given: Any) -> None:
    model = nn.Linear(2, 2)
    surefoot.attach(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data=[torch.ones(1, 2)],
        folder=folder,
        **given,
    ).close()


def saved(folder: Path, value: Any) -> None:
    checkpoint.save(folder, 1, {"it": value})


def trained(folder: Path, value: Any) -> None:
    class Holding(Small):
        def state(self) -> dict[str, Any]:
            return {"it": value}

    with Run(spec(2), Holding(), folder=folder, quiet=True) as run:
        list(run.steps())


class Schedule:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


CLASSES = {
    "a module": nn.Linear,
    "an optimizer": torch.optim.SGD,
    "one of the user's": Schedule,
    "a plain value": int,
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_in_place_of_an_object_is_refused_by_its_name_before_anything_is_trained(
    name: str, tmp_path: Path
) -> None:
    given = CLASSES[name]
    says = (
        f"'?it'? .*the class {given.__name__}, "
        "which (cannot be restored in place|a checkpoint cannot store)"
    )
    for number, refuse in enumerate(
        (saved, trained, lambda folder, value: attached(folder, state={"it": value}))
    ):
        with pytest.raises(TaskError, match=says) as refused:
            refuse(tmp_path / str(number), given)
        assert refused.value.hint
        assert not (tmp_path / str(number) / "checkpoints").exists()


@pytest.mark.parametrize("inside", [nn.ReLU, np.float32, len, {1, 2}])
def test_what_a_state_dict_holds_and_no_checkpoint_is_refused_before_anything_is_trained(
    inside: Any, tmp_path: Path
) -> None:
    class Odd(Schedule):
        def state_dict(self) -> dict[str, Any]:
            return {"fn": inside}

    for number, refuse in enumerate(
        (saved, trained, lambda folder, value: attached(folder, state={"it": value}))
    ):
        with pytest.raises(
            TaskError,
            match=r"it/fn is (the class|the function|a set).* which a checkpoint cannot store",
        ):
            refuse(tmp_path / str(number), Odd())


def test_a_parameter_of_too_many_dimensions_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    class Deep(Small):
        def model(self) -> nn.Module:
            model = super().model()
            model.register_buffer("deep", torch.ones(DEEP))
            return model

    with (
        pytest.raises(TaskError, match="deep is a tensor of 1,000 dimensions"),
        Run(spec(2), Deep(), folder=tmp_path, quiet=True),
    ):
        pass
    model = nn.Linear(2, 2)
    model.register_buffer("deep", torch.ones(DEEP))
    with pytest.raises(TaskError, match="deep is a tensor of 1,000 dimensions"):
        checkpoint.save(tmp_path / "a", 1, {"model": model})
