"""What an attached loop is told: in the words of a loop, and only what is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.core.errors import SurefootError
from surefoot.runtime.attributes.tracker import AttributeTracker

OF_TASKS = ("of the task", "model()", "optim.", "train.", "data.", "spec")


class Mean:
    def __init__(self) -> None:
        self.mean = torch.zeros(2)


class Opaque(nn.Module):
    """Keeps a mean in an object, which no checkpoint can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.held, self.other = nn.Linear(2, 2), Mean(), Mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        self.held.mean = 0.9 * self.held.mean + 0.1 * out.detach().mean(0)
        return out - self.held.mean


class InExtraState(Opaque):
    def get_extra_state(self) -> Any:
        return {"mean": self.held.mean}

    def set_extra_state(self, state: Any) -> None:
        self.held.mean = state["mean"]


class InNumbers(InExtraState):
    def get_extra_state(self) -> Any:
        return {"mean": self.held.mean.tolist()}

    def set_extra_state(self, state: Any) -> None:
        self.held.mean = torch.tensor(state["mean"])


class InStateDict(Opaque):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "mean"] = self.held.mean


class AroundIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Opaque()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out

    def get_extra_state(self) -> Any:
        return {"mean": self.inner.held.mean}

    def set_extra_state(self, state: Any) -> None:
        self.inner.held.mean = state["mean"]


@pytest.mark.parametrize("kind", [InExtraState, InNumbers, InStateDict, AroundIt])
def test_what_a_state_dict_of_the_module_contains_is_not_unsaved(kind: type[nn.Module]) -> None:
    model = kind()
    tracker, part = AttributeTracker(model), getattr(model, "inner", model)
    model(torch.ones(3, 2))
    mean = part.held.mean
    assert tracker.find_changed().unsaved == ()
    assert part.held.mean is mean
    part.other.mean = torch.ones(2)  # of which the state dict knows nothing
    (named,) = tracker.find_changed().unsaved
    assert named.endswith("other (Mean)")


def train(model: nn.Module, folder: Path, **more: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with surefoot.attach(
        model=model, optimizer=optimizer, data=[torch.ones(3, 2)] * 3, folder=folder, **more
    ) as run:
        for x in run.batches():
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step_done(loss)


def test_an_attribute_that_is_not_saved_is_named_with_what_a_loop_can_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(Opaque(), tmp_path / "a", save="1 steps")
    told = " ".join(capsys.readouterr().err.split())
    assert "held (Mean) of the model changes while it trains" in told
    assert "get_extra_state() of the module" in told
    assert "state={'held': ...}" in told
    assert not [word for word in OF_TASKS if word in told]
    train(InExtraState(), tmp_path / "b", save="1 steps")
    assert "changes while it trains" not in capsys.readouterr().err


class Stateful(Mean):
    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def test_an_attribute_that_is_given_as_state_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, again = Opaque(), Opaque()
    model.held, again.held = Stateful(), Stateful()
    train(model, tmp_path / "a", save="1 steps", state={"held": model.held})
    assert "changes while it trains" not in capsys.readouterr().err
    surefoot.attach(
        model=again,
        optimizer=torch.optim.SGD(again.parameters(), lr=0.1),
        data=[torch.ones(3, 2)] * 3,
        folder=tmp_path / "a",
        state={"held": again.held},
    ).close()
    assert torch.equal(again.held.mean, model.held.mean)


def test_a_weight_that_is_not_finite_is_told_once_with_its_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.weight.data.fill_(torch.nan)
    with pytest.raises(SurefootError, match=r"^step 1: weight is not finite") as caught:
        train(model, tmp_path / "a", save="1 steps")
    assert not [word for word in OF_TASKS if word in str(caught.value)]


def test_a_lazy_module_is_refused_with_what_a_loop_can_do(tmp_path: Path) -> None:
    with pytest.raises(SurefootError, match="is lazy") as caught:
        train(nn.LazyLinear(2), tmp_path / "a")
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("call the model on one batch before attach")
