"""Delays of known size put into one phase of a run, and the records of that run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.components.data.sources.arrays import Arrays
from surefoot.components.metrics import Mean
from surefoot.components.observe.journal import Journal
from surefoot.components.profiler.phases.clock import COMMUNICATION, PhaseClock
from surefoot.contract.events import Event, Step
from surefoot.contract.task import Guarantee, Loss
from surefoot.train.run import Run
from tests.train.small import Small, records, spec

SIZES_S = (0.002, 0.005, 0.01, 0.02, 0.05)
# times that each size is planted: the least is what a phase takes without the noise of the machine
EACH = 4
NUM_STEPS = 2 * EACH * len(SIZES_S)
PLACES = {
    "data": "data",
    "augmentation": "data",
    "forward": "forward",
    "loss": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "logging": "logging",
    "other": "other",
}
# these stand in the record of the next step
AFTER_THE_STEP = ("evaluation", "checkpoint", "logging", "other")


def wait(seconds: float) -> float:
    """Be busy for so long; gives how long it really was."""
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        pass
    return time.perf_counter() - began_s


class Plant:
    """A busy wait in every second step, of each size in turn.

    `spent_s` is what it really took, by step.

    With a clock the other steps wait as long in the same place, told as `communication`: they
    differ in nothing but where it counts.
    """

    def __init__(self) -> None:
        self.step = 0
        self.spent_s: dict[int, float] = {}
        self.clock: PhaseClock | None = None

    def size_of(self, step: int) -> float:
        return SIZES_S[step // 2 % len(SIZES_S)]

    def wait(self) -> None:
        if self.step > NUM_STEPS:
            return
        if self.step % 2:
            assert self.step not in self.spent_s
            self.spent_s[self.step] = wait(self.size_of(self.step))
        elif self.step and self.clock is not None:
            with self.clock.within(COMMUNICATION):
                wait(self.size_of(self.step))


class Waiting:
    """A source that calls before it reads."""

    guarantee: Guarantee = "proven"

    def __init__(self, source: Arrays, call: Callable[[], None]) -> None:
        self.source, self.call, self.digest = source, call, source.digest

    def __len__(self) -> int:
        return len(self.source)

    def read(self, ids: np.ndarray) -> Any:
        self.call()
        return self.source.read(ids)

    def describe(self) -> str:
        return self.source.describe()


class Slow(torch.optim.SGD):
    call: Callable[[], None]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.call()
        super().step()


class Planted(Small):
    """Waits where `where` says."""

    def __init__(self, where: str, plant: Plant) -> None:
        super().__init__()
        self.where, self.plant = where, plant

    def at(self, where: str) -> None:
        if where == self.where:
            self.plant.wait()

    def data(self, split: str) -> Any:
        source = super().data(split)
        return Waiting(source, lambda: self.at("data")) if split == "train" else source

    def augment(self, batch: Any, keys: Any) -> Any:
        self.at("augmentation")
        return super().augment(batch, keys)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            self.at("forward")
        output = super().forward(model, batch)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.at("backward"))
        return output

    def loss(self, output: Tensor, batch: Any) -> Loss:
        if output.requires_grad:
            self.at("loss")
        return super().loss(output, batch)

    def optimizer(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        made = Slow(groups, lr=0.01)
        made.call = lambda: self.at("optimizer")
        return made

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Mean]:
        self.at("evaluation")
        return super().metrics(output, batch)

    def state(self) -> Mapping[str, Tensor]:
        self.at("checkpoint")
        return {"nothing": torch.zeros(1)}


def drive_planted(where: str, plant: Plant, folder: Path, *, aside: bool) -> dict[int, Step]:
    """The records of a run with one for each step.

    It evaluates or saves after each where that is what waits.
    """
    observed = spec(NUM_STEPS + 1, observe={"every": "1 step"}, evaluate={"batch": 24})
    with Run(observed, Planted(where, plant), folder=folder, quiet=True) as run:
        plant.step, plant.clock = 1, run.assembly.engine.steps.clock if aside else None
        for report in run.steps():
            if where in ("evaluation", "checkpoint"):
                run.evaluate() if where == "evaluation" else run.save()
            elif where == "other":
                plant.wait()
            plant.step = report.step + 1
        plant.step = 0
    return {event.step: event for event in records(folder) if isinstance(event, Step)}


@contextmanager
def slow_journal(plant: Plant) -> Iterator[None]:
    """Records of steps are written slowly inside the block."""
    write = Journal.write

    def slow(journal: Journal, event: Event) -> str | None:
        if isinstance(event, Step):
            plant.wait()
        return write(journal, event)

    Journal.write = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        Journal.write = write  # type: ignore[method-assign]


@dataclass(frozen=True)
class Told:
    """What a planted run told, by step.

    Seconds of the phase that holds the delay without the delay itself, of all others, told aside.
    """

    plant: Plant
    own_s: Mapping[int, float]
    others_s: Mapping[int, float]
    aside_s: Mapping[int, float]

    def grown_s(self, size_s: float) -> tuple[float, float]:
        """By how much the phase grew beyond a delay of `size_s`, and by how much all others.

        The least of the steps with and without.
        """
        planted = [step for step in self.plant.spent_s if self.plant.size_of(step) == size_s]
        without = [
            step
            for step in self.without
            if self.plant.clock is None or self.plant.size_of(step) == size_s
        ]
        own, others = (
            min(row[step] for step in planted) - min(row[step] for step in without)
            for row in self._rows
        )
        return own, others

    @property
    def _rows(self) -> tuple[Mapping[int, float], Mapping[int, float]]:
        return self.own_s, self.others_s

    @property
    def without(self) -> list[int]:
        return [step for step in self.own_s if step not in self.plant.spent_s]


def tell_planted(where: str, folder: Path, *, aside: bool = False) -> Told:
    """Run with delays at `where` and read what the records tell of them; `aside`: see `Plant`."""
    plant, name = Plant(), PLACES[where]
    with slow_journal(plant) if where == "logging" else nullcontext():
        by_step = drive_planted(where, plant, folder, aside=aside)
    shift = int(where in AFTER_THE_STEP)
    rows = {step: by_step[step + shift].phases for step in range(1, NUM_STEPS + 1)}
    own = {step: row.get(name, 0.0) - plant.spent_s.get(step, 0.0) for step, row in rows.items()}
    others = {
        step: sum(s for phase, s in row.items() if phase not in (name, "communication"))
        for step, row in rows.items()
    }
    return Told(
        plant, own, others, {step: row.get("communication", 0.0) for step, row in rows.items()}
    )
