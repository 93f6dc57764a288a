"""A run that was stopped anywhere and goes on ends with the bits of one that never was."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from surefoot.components import checkpoint
from surefoot.contract import ledger, manifest, spec_file
from surefoot.contract.events import Step
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import RunFolderError, SpecError
from surefoot.runtime.staging import Staging
from surefoot.train.resume.start import Start
from surefoot.train.run import Run
from tests.train.small import OPTIMIZERS, Small, faults_of, records, spec

STEPS, STOP, EVERY = 22, 13, 5


class Left(Exception):
    """Leaves a run as a kill would: nothing is saved on the way out."""


class Rich(Small):
    """Dropout, BatchNorm, draws from every global stream, and state of the task's own."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3, norm=True)
        self.seen, self.table = torch.zeros(3), np.zeros(3)
        self.noise = torch.Generator().manual_seed(5)

    def augment(self, batch: Any, keys: Any) -> Any:
        """Outside of the forward pass, whose draws start from the step alone."""
        shift = 0.01 * (np.random.random() + random.random())  # noqa: NPY002 - global streams are what is tested
        return super().augment((batch[0] + shift, batch[1]), keys)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            self.seen += torch.bincount(batch[1], minlength=3)
            self.table[0] += np.random.random() + random.random()  # noqa: NPY002 - global streams are what is tested
        return super().forward(model, batch) * (
            1 + 0.01 * float(self.seen.sum() % 7) + 0.01 * float(self.table[0] % 1)
        )

    def state(self) -> Mapping[str, Any]:
        return {"seen": self.seen, "table": self.table}


def train(folder: Path, how: RunSpec, task: Any, *, leave_at: int | None = None) -> Run | None:
    """A run that is evaluated now and then; left at a step as by a kill, or whole."""
    try:
        with Run(how, task, folder=folder, quiet=True) as run:
            for report in run.steps():
                if run.evaluation_due:
                    run.evaluate()
                if report.step == leave_at:
                    raise Left
    except Exception as error:
        if leave_at is None or not isinstance(error.__cause__ or error, Left):
            raise
        return None
    return run


def bits(folder: Path, step: int = STEPS) -> dict[str, str]:
    """The digest of every file of a commit but the one that holds times."""
    files = manifest.read(manifest.step_folder(folder, step)).files
    return {entry.name: entry.sha256 for entry in files if entry.name != "clock.json"}


def losses(folder: Path) -> dict[int, float | None]:
    """Each step's loss, of the newest attempt that did it."""
    return {event.step: event.loss for event in records(folder) if isinstance(event, Step)}


HOW: dict[str, dict[str, Any]] = {
    **{f"optim {name}": {"optim": table} for name, table in OPTIMIZERS.items()},
    "an average of the weights": {"optim": {"ema": 0.9}},
    "accumulation": {"train": {"microbatch": 2}},
    "a batch that grows": {
        "train": {"batch": 8, "microbatch": 2, "ramp": [[0, 2], [10, 4], [50, 8]]},
        "optim": {"reference_batch": 8},
    },
    "a plateau schedule": {"schedule": {"name": "plateau", "patience": 1}},
    "one-cycle": {"schedule": {"name": "one_cycle"}, "optim": {"name": "sgd"}},
    "frozen weights": {"optim": {"freeze": ["0.*"]}},
    "blocking saves": {"checkpoint": {"background": False}},
    "bf16": {"precision": {"compute": "bf16"}},
    "fp16 with its loss scale": {"precision": {"compute": "fp16", "growth_interval": 3}},
    "clipping by value": {"optim": {"clip": 0.0, "clip_value": 0.01}},
}


@pytest.mark.quick("optim muon", "fp16 with its loss scale", "a plateau schedule")
@pytest.mark.parametrize("name", HOW)
def test_a_run_that_was_left_in_the_middle_ends_with_the_same_bits_losses_and_ledger(
    name: str, tmp_path: Path
) -> None:
    tables = {key: dict(table) for key, table in HOW[name].items()}
    tables["checkpoint"] = {"every": f"{EVERY} steps", **tables.get("checkpoint", {})}
    tables["evaluate"] = {"every": "4 steps"}
    tables["observe"] = {"every": "1 step"}
    how = spec(STEPS, **tables)
    train(tmp_path / "whole", how, Rich())
    train(tmp_path / "left", how, Rich(), leave_at=STOP)
    assert STOP - 5 <= max(manifest.steps(tmp_path / "left")) <= STOP
    train(tmp_path / "left", how, Rich(), leave_at=STOP + 5)
    train(tmp_path / "left", how, Rich())
    assert bits(tmp_path / "left") == bits(tmp_path / "whole")
    assert losses(tmp_path / "left") == losses(tmp_path / "whole")
    rows, _ = ledger.consumed(ledger.read(tmp_path / "left"))
    whole, _ = ledger.consumed(ledger.read(tmp_path / "whole"))
    assert [(row.step, row.checksum) for row in rows] == [(row.step, row.checksum) for row in whole]


OWN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "adamw in a loop": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=False),
    "adam of torch's fused kernel": lambda groups: torch.optim.Adam(
        groups, lr=0.01, amsgrad=True, fused=True
    ),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


@pytest.mark.quick("adagrad")
@pytest.mark.parametrize("name", OWN)
def test_an_optimizer_of_the_tasks_own_goes_on_with_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    class Own(Rich):
        def optimizer(self, groups: Any) -> torch.optim.Optimizer:
            return OWN[name](groups)

    how = spec(STEPS, checkpoint={"every": f"{EVERY} steps"})
    train(tmp_path / "whole", how, Own())
    train(tmp_path / "left", how, Own(), leave_at=STOP)
    train(tmp_path / "left", how, Own())
    assert bits(tmp_path / "left") == bits(tmp_path / "whole")


class Hidden(nn.Linear):
    """A layer whose output depends on buffers that are not persistent, and on extra state.

    Its first batch makes one of the buffers.
    """

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("mean", None, persistent=False)
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = (
                x.detach().mean(0) if self.mean is None else self.mean.lerp(x.detach().mean(0), 0.1)
            )
            self.cache = torch.cat([self.cache[-5:], x.detach()[:1, 0]])
            self.calls += 1
        return (
            super().forward(x if self.mean is None else x + self.mean)
            + self.cache.sum()
            + 0.01 * (self.calls % 7)
        )

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.calls])

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)


class Slowing(torch.optim.Optimizer):
    """Keeps its counter under a name, and of no parameter."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        shared = self.state["all"]  # type: ignore[index]
        shared["steps"] = shared.get("steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= parameter.grad * group["lr"] / shared["steps"] ** 0.5


def test_what_no_state_dict_names_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Hidden buffers, extra state, and what an optimizer keeps of no parameter."""

    class Unnamed(Small):
        def model(self) -> nn.Module:
            return Hidden()

        def optimizer(self, groups: Any) -> torch.optim.Optimizer:
            return Slowing(groups)

    how = spec(STEPS, checkpoint={"every": f"{EVERY} steps"})
    train(tmp_path / "whole", how, Unnamed())
    train(tmp_path / "left", how, Unnamed(), leave_at=STOP)
    train(tmp_path / "left", how, Unnamed())
    assert bits(tmp_path / "left") == bits(tmp_path / "whole")


@pytest.mark.quick("optimizer", "task")
@pytest.mark.parametrize("lost", ["optimizer", "random", "task", "scores", "guard", "scaler"])
def test_each_part_of_the_state_is_needed_for_the_same_bits(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes one part away while going on.

    The end must then differ, or the part would not be worth its place.
    """
    precision = {"compute": "fp16", "growth_interval": 3} if lost == "scaler" else {}
    how = spec(
        STEPS,
        checkpoint={"every": f"{EVERY} steps"},
        evaluate={"every": "4 steps"},
        precision=precision,
    )
    train(tmp_path / "whole", how, Rich())
    train(tmp_path / "left", how, Rich(), leave_at=STOP)
    target = {
        "optimizer": "surefoot.components.optim.update.GuardedUpdate.restore",
        "random": "surefoot.components.checkpoint.restore_random",
        "task": "surefoot.train.resume.put_back.restore_entry",
        "scores": "surefoot.train.record.scores.Scores.restore",
        "guard": "surefoot.components.stability.guard.Guard.restore",
        "scaler": "surefoot.components.precision.LossScaler.load_state_dict",
    }[lost]
    monkeypatch.setattr(target, lambda *given: None)
    train(tmp_path / "left", how, Rich())
    assert bits(tmp_path / "left") != bits(tmp_path / "whole")


def test_a_run_that_never_saves_by_the_clock_commits_at_its_end_alone(tmp_path: Path) -> None:
    how = spec(6, checkpoint={"every": None})
    train(tmp_path / "run", how, Small())
    assert manifest.steps(tmp_path / "run") == [6]
    assert spec_file.read(str(tmp_path / "run" / "spec.toml")).spec.checkpoint.every == "never"


def test_frozen_weights_are_linked_and_not_written_again(tmp_path: Path) -> None:
    how = spec(12, checkpoint={"every": "2 steps", "keep": 9}, optim={"freeze": ["0.*"]})
    train(tmp_path / "a", how, Small())
    entries = [
        next(
            each
            for each in manifest.read(manifest.step_folder(tmp_path / "a", step)).files
            if each.name.endswith("00002-of-00002.safetensors")
        )
        for step in (2, 4, 12)
    ]
    assert [entry.since for entry in entries] == [2, 2, 2]
    assert (
        len(
            {
                (manifest.step_folder(tmp_path / "a", step) / entries[0].name).stat().st_ino
                for step in (2, 4, 12)
            }
        )
        == 1
    )


def wide(task: Small) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3))


def with_momentum(task: Small, groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("part", "other", "told"),
    [
        ("model", wide, "of a different shape: 0.bias"),
        ("optimizer", with_momentum, "resume with the task and the spec"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_in_words_and_nothing_is_set_aside(
    part: str, other: Any, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = spec(STEPS, checkpoint={"every": "5 steps"})
    train(tmp_path / "a", how, Small(), leave_at=STOP)
    before = manifest.steps(tmp_path / "a")
    with monkeypatch.context() as changed:
        changed.setattr(Small, part, other, raising=False)
        with (
            pytest.raises(RunFolderError, match=told),
            Run(how, Small(), folder=tmp_path / "a", accept_code_change=True, quiet=True),
        ):
            pass
    assert manifest.steps(tmp_path / "a") == before
    train(tmp_path / "a", how, Small())


def test_a_state_of_the_tasks_that_the_commit_does_not_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = spec(STEPS, checkpoint={"every": "5 steps"})
    train(tmp_path / "a", how, Rich(), leave_at=STOP)
    monkeypatch.setattr(
        Rich, "state", lambda task: {"seen": task.seen, "table": task.table, "more": torch.zeros(2)}
    )
    with pytest.raises(RunFolderError, match="names 'more', which the checkpoint does not hold"):
        train(tmp_path / "a", how, Rich())


def test_a_length_in_time_is_that_of_all_attempts(tmp_path: Path) -> None:
    how = spec(train={"length": "1000 s"}, schedule={"name": "constant"})
    with contextlib.suppress(Left), Run(how, Small(), folder=tmp_path / "a", quiet=True) as run:
        for _ in run.steps():
            run.session.progress.training_s += 1000.0  # as if it had taken so long
            run.save()
            raise Left
    with Run(how, Small(), folder=tmp_path / "a", quiet=True) as again:
        assert next(again.steps(), None) is None
    assert (again.outcome, again.step) == ("finished", 1)
    fork = Run(how, Small(), folder=tmp_path / "b", quiet=True, start=Start(tmp_path / "a", 1))
    with pytest.raises(SpecError, match="no time is left"), fork:
        pass


def test_a_weight_that_is_changed_while_it_is_copied_costs_that_save_and_is_told(
    tmp_path: Path,
) -> None:
    class Clamped(Small):
        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                model.get_parameter("4.bias").clamp_(-1, 1)
            return super().forward(model, batch)

    run = train(tmp_path / "a", spec(12, checkpoint={"every": "5 steps"}), Clamped())
    assert run is not None
    told = [fault.detail for fault in faults_of(tmp_path / "a")]
    assert len(told) == 2
    assert all("4.bias" in detail and "checkpoint.background" in detail for detail in told)
    assert manifest.steps(tmp_path / "a") == [12]


def test_a_save_that_gets_no_thread_is_written_in_place_and_nobody_waits_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "surefoot-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    train(tmp_path / "a", spec(12, checkpoint={"every": "5 steps"}), Small())
    assert manifest.steps(tmp_path / "a") == [5, 10, 12]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_a_save_copies_at_the_priority_of_the_training_and_yields_to_it_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    def seeing(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            seen.append((what, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
            return call(*args, **named)

        return called

    monkeypatch.setattr(Staging, "copy", seeing("copy", Staging.copy))
    monkeypatch.setattr(checkpoint, "commit", seeing("commit", checkpoint.commit))
    train(tmp_path / "a", spec(12, checkpoint={"every": "10 steps"}), Small())
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert set(seen) == {("copy", ours), ("commit", 19)}


def test_what_a_kill_left_undeleted_goes_with_the_next_start(tmp_path: Path) -> None:
    def kept(number: int) -> RunSpec:
        return spec(STEPS, checkpoint={"every": f"{EVERY} steps", "keep": number})

    # as if each kill had come between a commit and its clean-up
    train(tmp_path, kept(9), Small(), leave_at=3 * EVERY + 1)
    assert manifest.steps(tmp_path) == [EVERY, 2 * EVERY, 3 * EVERY]
    with Run(kept(2), Small(), folder=tmp_path, quiet=True):
        assert manifest.steps(tmp_path) == [2 * EVERY, 3 * EVERY]
