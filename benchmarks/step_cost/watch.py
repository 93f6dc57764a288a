"""What every arm's process does around its loop.

Read its orders, time the steps after the warm-up, take tensors, report.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from benchmarks.step_cost.models import WORKLOADS, Workload
from surefoot.trial import capture, write_report


class Watch:
    """Called after each step by every arm alike: `tick(model, loss)`.

    Times the steps after the warm-up; takes tensors where asked.
    `loss` is read, by `read_loss`, only at a step whose tensors are wanted.

    `loss` is read, by `read_loss`, only at a step whose tensors are wanted.
    """

    read_loss: Callable[[Any], float] = staticmethod(float)

    def __init__(
        self, workload: Workload, tensors: Sequence[int] = (), losses: Sequence[int] = ()
    ) -> None:
        self.total = workload.warmup + workload.steps
        self.compares = bool(tensors or losses)
        self._name, self._first, self._last = workload.name, workload.warmup, self.total
        self._tensors, self._losses = frozenset(tensors), frozenset(losses)
        self._marks = {self._first, self._last, *tensors, *losses}
        self._done = 0
        self._cpu_s = self._wall_s = 0.0
        self.measures: dict[str, float] = {}
        self.arrays: dict[str, Any] = {}

    def start(self) -> None:
        """Before the first step, for a workload without warm-up."""
        self._cpu_s, self._wall_s = time.process_time(), time.perf_counter()

    def tick(self, model: nn.Module, loss: Any) -> None:
        self._done += 1
        if self._done in self._marks:
            self._mark(model, loss)

    def _mark(self, model: nn.Module, loss: Any) -> None:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        if self._done == self._last:
            steps = self._last - self._first
            self.measures = {
                "cpu_s_per_step": (cpu_s - self._cpu_s) / steps,
                "wall_s_per_step": (wall_s - self._wall_s) / steps,
            }
        if self._done in self._tensors:
            found = capture(model, self.read_loss(loss), self._done)
            self.arrays |= {f"{self._name}/{name}": array for name, array in found.items()}
        if self._done in self._losses:
            self.arrays[f"{self._name}/loss/{self._done}"] = np.array(self.read_loss(loss))
        if self._done == self._first:
            self.start()


@dataclass(frozen=True)
class Orders:
    """What the command line asks of an arm."""

    models: tuple[str, ...]
    report: str
    folder: str
    steps: int | None = None
    tensors: tuple[int, ...] = ()
    losses: tuple[int, ...] = ()
    batches: int | None = None


class Train(Protocol):
    """An arm: trains `workload` for `watch.total` steps and ticks after each.

    Writes to `folder`.
    """

    def __call__(self, workload: Workload, watch: Watch, folder: str) -> None: ...


def main(train: Train, packages: Sequence[str] = ()) -> None:
    """Run an arm as the command line says and report its times for each model.

    They are `<model>/cpu_s_per_step` and `<model>/wall_s_per_step`.
    """
    torch.set_num_threads(1)
    orders = _read_orders()
    measures: dict[str, float] = {}
    arrays: dict[str, Any] = {}
    for name in orders.models:
        workload = WORKLOADS[name]
        if orders.steps is not None:
            workload = replace(workload, warmup=0, steps=orders.steps)
        if orders.batches is not None:
            workload = replace(workload, num_batches=orders.batches)
        watch = Watch(workload, orders.tensors, orders.losses)
        watch.start()
        train(workload, watch, f"{orders.folder}/{name}")
        measures |= {f"{name}/{measure}": value for measure, value in watch.measures.items()}
        arrays |= watch.arrays
    versions = {package: metadata.version(package) for package in ("torch", *packages)}
    write_report(orders.report, measures, facts=versions, arrays=arrays or None)


def _read_orders() -> Orders:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", required=True, help="names joined by commas")
    parser.add_argument("--report", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, help="instead of the workload's own, without warm-up")
    parser.add_argument(
        "--tensors",
        type=int,
        nargs="*",
        default=[],
        help="steps whose loss, gradients and weights are reported",
    )
    parser.add_argument(
        "--losses", type=int, nargs="*", default=[], help="steps whose loss is reported"
    )
    parser.add_argument("--batches", type=int, help="of data, instead of the workload's own number")
    asked = parser.parse_args()
    models = tuple(asked.models.split(","))
    return Orders(
        models,
        asked.report,
        asked.folder,
        asked.steps,
        tuple(asked.tensors),
        tuple(asked.losses),
        asked.batches,
    )
