"""What every arm's process does: the models of step_cost and a GPT of 12 layers, by a plain loop or by surefoot, compiled as the arm says.

Reports, of each model, `first_s`: wall time from the start of the loop to the end of the first step that runs as all later ones do, with
nothing compiled before it (a folder of its own holds what the compiler keeps), and `cpu_s_per_step` of the steps after the warm-up.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from benchmarks.step_cost.arms.surefoot_run import Costed
from benchmarks.step_cost.models import CLIP, GPT, LEARNING_RATE, READ_EVERY, SEED, WORKLOADS, Workload, mean_loss
from surefoot.contract.spec import RunSpec
from surefoot.train.run import Run
from surefoot.train.step.stepper import EAGER_STEPS
from surefoot.trial import write_report

MODELS = {
    "mlp": WORKLOADS["mlp"],
    "convnet": replace(WORKLOADS["convnet"], warmup=8),
    "gpt": replace(WORKLOADS["gpt"], warmup=8),
    "deep": replace(WORKLOADS["gpt"], name="deep", make=functools.partial(GPT, layers=12), warmup=8),
}
KINDS = ("idiomatic", "eager", "blocks", "model", "step")
FIRST = {"idiomatic": 1, "eager": 2, "blocks": 2, "model": 2, "step": EAGER_STEPS + 1}  # the step that runs as all later ones do


class Compiled(Costed):
    """One of the models as a task."""

    def __init__(self, workload: str) -> None:
        self.workload = MODELS[workload]


class Watch:
    """Times the steps of a loop that calls `tick` after each."""

    def __init__(self, first: int, warmup: int, steps: int) -> None:
        self.total = warmup + steps
        self._first, self._warmup = first, warmup
        self._done, self._begun_s, self._cpu_s = 0, time.perf_counter(), 0.0
        self.measures: dict[str, float] = {}

    def tick(self) -> None:
        self._done += 1
        if self._done == self._first:
            self.measures["first_s"] = time.perf_counter() - self._begun_s
        if self._done == self._warmup:
            self._cpu_s = time.process_time()
        if self._done == self.total:
            self.measures["cpu_s_per_step"] = (time.process_time() - self._cpu_s) / (self.total - self._warmup)


def train_plainly(workload: Workload, watch: Watch) -> None:
    model, batches = workload.model(), workload.batches()
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(watch.total):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if step % READ_EVERY == 0:
            losses.append(loss.item())
        watch.tick()


def train(workload: Workload, kind: str, folder: str, tick: Callable[[], Any], total: int) -> None:
    spec = RunSpec(
        task={"use": "benchmarks.compile.arm:Compiled", "workload": workload.name},
        compile={"what": "none" if kind == "eager" else kind, "on_failure": "stop"},
        optim={"lr": LEARNING_RATE}, schedule={"name": "constant"},
        train={"length": f"{total} steps", "batch": workload.batch, "seed": SEED, "threads": 1},
        observe={"tensorboard": False},
    )  # fmt: skip
    with Run(spec, folder=folder) as run:
        for _ in islice(run.steps(), total):
            tick()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True, choices=KINDS)
    parser.add_argument("--models", required=True, help="names joined by commas")
    parser.add_argument("--steps", type=int, help="measured, instead of the model's own")
    parser.add_argument("--report", required=True)
    parser.add_argument("--folder", required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{asked.folder}/compiled"  # torch reads it when it compiles first
    measures: dict[str, float] = {}
    for name in asked.models.split(","):
        workload = MODELS[name]
        watch = Watch(FIRST[asked.kind], workload.warmup, asked.steps or workload.steps)
        if asked.kind == "idiomatic":
            train_plainly(workload, watch)
        else:
            train(workload, asked.kind, f"{asked.folder}/{name}", watch.tick, watch.total)
        measures |= {f"{name}/{measure}": value for measure, value in watch.measures.items()}
    write_report(asked.report, measures)


if __name__ == "__main__":
    main()
