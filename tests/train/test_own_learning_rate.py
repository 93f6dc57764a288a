"""Optimizers that compute their learning rate themselves train, resume and are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.contract import events
from surefoot.contract.events import Step
from surefoot.train.attach import attach
from surefoot.train.run import Run
from tests.train import small


class Harmonic(Optimizer):
    """SGD whose step n has the learning rate 0.1 / n, whatever stands in its groups."""

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.add_(parameter.grad, alpha=-0.1 / state["step"])


KINDS: dict[str, dict[str, Any]] = {
    "None": {"lr": None},
    "absent": {},
    "a tensor": {"lr": torch.tensor(0.5)},
}


def rates_of(folder: Path) -> list[float]:
    steps = [each for each in events.read(folder) if isinstance(each, Step)]
    assert steps
    return [rate for each in steps for rate in each.learning_rates.values()]


@pytest.mark.quick("absent", "a tensor")
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_records_and_resumes_it(kind: str, tmp_path: Path) -> None:
    data = [torch.randn(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(8)]

    def train(folder: Path, stop: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = Harmonic(model.parameters(), **KINDS[kind])
        with attach(
            model=model, optimizer=optimizer, data=data, folder=folder, save="3 steps"
        ) as run:
            for number, batch in enumerate(run.batches(), 1):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                run.step_done(loss.detach())
                if number == stop:
                    break
        return model.weight.detach().clone()

    whole = train(tmp_path / "whole", 8)
    train(tmp_path / "cut", 3)
    assert torch.equal(train(tmp_path / "cut", 8), whole)
    recorded = rates_of(tmp_path / "cut")
    assert set(recorded) == ({0.5} if kind == "a tensor" else set())


@pytest.mark.parametrize("kind", ["None", "absent"])
def test_a_run_trains_and_says_that_the_schedule_has_no_effect(kind: str, tmp_path: Path) -> None:
    class Own(small.Small):
        def optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
            return Harmonic(groups, **KINDS[kind])

    with Run(small.spec(4), Own(), folder=tmp_path / "run", quiet=True) as run:
        before = [each.detach().clone() for each in run.model.parameters()]
        reports = list(islice(run.steps(), 4))
        moved = [
            not torch.equal(old, new)
            for old, new in zip(before, run.model.parameters(), strict=True)
        ]
        notes = [*run.assembly.notes]
    assert all(moved)
    assert {report.learning_rate for report in reports} == {None}
    assert rates_of(tmp_path / "run") == []
    assert any("Harmonic computes its learning rate itself" in each for each in notes)
