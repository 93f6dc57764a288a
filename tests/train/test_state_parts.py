"""Each random stream, the schedule's place, the average and the best score are saved.

A run without them ends elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import surefoot
from surefoot.components import checkpoint
from surefoot.components.checkpoint import Commit
from surefoot.components.optim.average import WeightAverage
from surefoot.contract import commits, manifest, runlock
from surefoot.contract.events import Evaluated, Started
from surefoot.core.schedule.plan import Curve
from surefoot.train.resume.start import Start
from surefoot.train.resume.state import LiveState
from surefoot.train.run import Run
from tests.train.small import Small, records, spec
from tests.train.test_resume import EVERY, STEPS, STOP, Rich, bits, train

SAVED = {"checkpoint": {"every": f"{EVERY} steps"}, "evaluate": {"every": "4 steps"}}


def without_stream(name: str) -> Callable[[Mapping[str, Any]], None]:
    """Put every stream back but one, which stays where this process left it."""
    put_back = checkpoint.restore_random

    def restore(saved: Mapping[str, Any]) -> None:
        put_back({**saved, name: checkpoint.random_states()[name]})

    return restore


class Drawing(Rich):
    """Draws from every global stream where data are read, outside what a step seeds by itself."""

    def augment(self, batch: Any, keys: Any) -> Any:
        drawn = torch.randn(4) + np.random.random() + random.random()  # noqa: NPY002 - global streams are what is tested
        return batch[0] + 0.1 * drawn, batch[1]


@pytest.mark.quick("python")
@pytest.mark.parametrize("stream", ["torch", "numpy", "python"])
def test_each_random_stream_is_needed_for_the_same_bits(
    stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = spec(STEPS, **SAVED)
    train(tmp_path / "whole", how, Drawing())
    train(tmp_path / "left", how, Drawing(), leave_at=STOP)
    monkeypatch.setattr(checkpoint, "restore_random", without_stream(stream))
    train(tmp_path / "left", how, Drawing())
    assert bits(tmp_path / "left") != bits(tmp_path / "whole")


@pytest.mark.quick("Curve-tables0")
@pytest.mark.parametrize(
    ("owner", "tables"),
    [
        (Curve, {"schedule": {"name": "plateau", "patience": 1}, "optim": {"lr": 0.3}}),
        (WeightAverage, {"optim": {"ema": 0.9}}),
    ],
)
def test_the_place_of_a_plateau_and_the_count_of_an_average_are_needed(
    owner: type, tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = spec(STEPS, **SAVED, **tables)
    train(tmp_path / "whole", how, Rich())
    train(tmp_path / "left", how, Rich(), leave_at=STOP)
    monkeypatch.setattr(owner, "restore", lambda self, state: None)
    train(tmp_path / "left", how, Rich())
    assert bits(tmp_path / "left") != bits(tmp_path / "whole")


@pytest.mark.parametrize("count", ["num_samples", "step"])
def test_the_counters_are_needed(
    count: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = spec(STEPS, **SAVED)
    train(tmp_path / "whole", how, Rich())
    train(tmp_path / "left", how, Rich(), leave_at=STOP)
    restore = LiveState.restore

    def forgetful(self: LiveState, commit: Commit, *more: Any) -> dict[str, Any]:
        tree = restore(self, commit, *more)
        if count == "num_samples":
            return {**tree, "num_samples": 0}
        for update in self._assembly.updates:
            update.guarded.applied_steps = 0  # the schedule's position
        return tree

    monkeypatch.setattr(LiveState, "restore", forgetful)
    train(tmp_path / "left", how, Rich())
    assert bits(tmp_path / "left") != bits(tmp_path / "whole")


class Declining(Small):
    """Learns so fast that it soon gets worse: the best evaluation is an early one."""


@pytest.mark.quick("9")
@pytest.mark.parametrize("leave_at", [None, 9, 15])
def test_the_best_is_the_true_best_stays_through_a_kill_and_is_never_rotated_away(
    leave_at: int | None, tmp_path: Path
) -> None:
    how = spec(
        20,
        optim={"name": "sgd", "lr": 30.0, "clip": 0.0, "momentum": 0.9},
        evaluate={"every": "2 steps", "score": "loss"},
        checkpoint={"every": "1 step", "keep": 2},
        stability={"diverged": 1e9},
    )
    if leave_at is not None:
        train(tmp_path / "a", how, Declining(), leave_at=leave_at)
    train(tmp_path / "a", how, Declining())
    scores = {
        event.step: event.loss for event in records(tmp_path / "a") if isinstance(event, Evaluated)
    }
    best = min(scores, key=lambda step: (scores[step], step))
    assert best < 18
    steps = manifest.steps(tmp_path / "a")
    assert steps == [best, 19, 20]
    assert commits.find_step(tmp_path / "a", "best") == best
    claimed = [
        event.step
        for event in records(tmp_path / "a")
        if isinstance(event, Evaluated) and event.best
    ]
    assert claimed[-1] == best


class Expanded(Small):
    """A model with a frozen parameter and buffers that are views: expanded, and conjugated."""

    def model(self) -> nn.Module:
        made = super().model()
        made.wide = nn.Parameter(torch.ones(1).expand(3), requires_grad=False)
        made.register_buffer("grid", torch.ones(1).expand(3))
        made.register_buffer("unsaved", torch.ones(1).expand(3), persistent=False)
        made.register_buffer("turned", torch.tensor([1 + 2j]).conj())
        return made

    def forward(self, model: Any, batch: Any) -> Any:
        return model(batch[0]) * model.wide


def test_a_model_of_views_goes_on_is_forked_and_loads(tmp_path: Path) -> None:
    how = spec(6, checkpoint={"every": "2 steps"})
    train(tmp_path / "a", how, Expanded(), leave_at=3)
    train(tmp_path / "a", how, Expanded())
    train(tmp_path / "whole", how, Expanded())
    assert bits(tmp_path / "a", 6) == bits(tmp_path / "whole", 6)
    with Run(
        spec(8), Expanded(), folder=tmp_path / "b", quiet=True, start=Start(tmp_path / "a", 4)
    ) as run:
        assert run.step == 4
    model = surefoot.load(tmp_path / "a", task=Expanded())
    assert model.turned.tolist() == [1 - 2j]
    assert torch.equal(model.wide, model.wide[:1].expand(3))


def test_a_system_without_locks_says_so_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlock, "fcntl", None)
    with Run(spec(1), Small(), folder=tmp_path / "a", quiet=True) as run:
        list(run.steps())
    started = next(event for event in records(tmp_path / "a") if isinstance(event, Started))
    assert any("no flock" in note for note in started.notes)


@pytest.mark.parametrize(("name", "values"), [("sgd", 1), ("adamw", 2)])
def test_the_size_of_a_checkpoint_counts_what_the_optimizer_holds(
    name: str, values: int, tmp_path: Path
) -> None:
    with Run(spec(2, optim={"name": name}), Small(), folder=tmp_path / "a", quiet=True) as run:
        state = LiveState(run.assembly)
        weights = sum(
            each.numel() * each.element_size() for each in run.assembly.model.parameters()
        )
        for _ in range(2):
            assert 0 <= state.num_bytes() - weights * (1 + values) < 200  # and counters of steps
            list(run.steps())
