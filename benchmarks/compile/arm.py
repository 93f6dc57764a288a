"""What every arm's process does.

The models of step_cost and a GPT of 12 layers, by a plain loop or by surefoot, compiled as the arm
says; `graph` is the plain loop with its whole step compiled.

Reports, of each model, `first_s`: wall time from the start of the loop to the end of the first step
that runs as all later ones do, with nothing compiled before it (a folder of its own holds what the
compiler keeps), and `cpu_s_per_step` of the steps after the warm-up.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.step_cost import watch as step_cost
from benchmarks.step_cost.arms import idiomatic
from benchmarks.step_cost.arms.surefoot_run import Costed
from benchmarks.step_cost.models import CLIP, GPT, LEARNING_RATE, SEED, WORKLOADS, Batch, Workload
from surefoot.components.optim.update import GuardedUpdate
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.train.run import Run
from surefoot.train.step.joined.whole import compile_step
from surefoot.train.step.program import EAGER_STEPS
from surefoot.trial import write_report

MODELS = {
    # a graph takes 800 steps in less than a tenth of a second
    "mlp": replace(WORKLOADS["mlp"], warmup=500, steps=8000),
    "convnet": replace(WORKLOADS["convnet"], warmup=8),
    "gpt": replace(WORKLOADS["gpt"], warmup=8),
    "deep": replace(
        WORKLOADS["gpt"], name="deep", make=functools.partial(GPT, layers=12), warmup=8, steps=40
    ),
}
KINDS = ("idiomatic", "eager", "blocks", "model", "step", "graph")
# the step that runs as all later ones do
FIRST = {"idiomatic": 1, "graph": 2, "eager": 2, "blocks": 2, "model": 2, "step": EAGER_STEPS + 1}


class Compiled(Costed):
    """One of the models as a task."""

    def __init__(self, workload: str) -> None:
        self.workload = MODELS[workload]


class Watch(step_cost.Watch):
    """Also times the loop up to the first step that runs as all later ones do."""

    def __init__(self, workload: Workload, first: int) -> None:
        super().__init__(workload)
        self._alike, self._begun_s, self.first_s = first, time.perf_counter(), 0.0

    def tick(self, model: nn.Module, loss: Any) -> None:
        super().tick(model, loss)
        if self._done == self._alike:
            self.first_s = time.perf_counter() - self._begun_s


def train(workload: Workload, kind: str, folder: str, watch: Watch) -> None:
    spec = RunSpec(
        task={"use": "benchmarks.compile.arm:Compiled", "workload": workload.name},
        compile={"what": "none" if kind == "eager" else kind, "on_failure": "stop"},
        optim={"lr": LEARNING_RATE},
        schedule={"name": "constant"},
        train={
            "length": f"{watch.total} steps",
            "batch": workload.batch,
            "seed": SEED,
            "threads": 1,
        },
        observe={"tensorboard": False},
    )
    with Run(spec, folder=folder) as run:
        for report in islice(run.steps(), watch.total):
            watch.tick(run.model, report)


def train_by_graph(workload: Workload, watch: Watch) -> None:
    """The plain loop over the same batches, its whole step one graph."""
    model, batches = workload.model(), workload.batches()
    update = GuardedUpdate(
        [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)], clip=CLIP
    )
    step = compile_step(model, sum_loss, update)
    for number in range(watch.total):
        terms, _, _ = step(batches[number % len(batches)])
        watch.tick(model, terms[0].total)


def sum_loss(model: nn.Module, batch: Batch) -> Loss:
    inputs, targets = batch
    return Loss.sum(
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="sum"),
        targets.numel(),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True, choices=KINDS)
    parser.add_argument("--models", required=True, help="names joined by commas")
    parser.add_argument("--steps", type=int, help="measured, instead of the model's own")
    parser.add_argument("--report", required=True)
    parser.add_argument("--folder", required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
        f"{asked.folder}/compiled"  # torch reads it when it compiles first
    )
    measures: dict[str, float] = {}
    for name in asked.models.split(","):
        workload = replace(MODELS[name], steps=asked.steps or MODELS[name].steps)
        watch = Watch(workload, FIRST[asked.kind])
        if asked.kind == "idiomatic":
            idiomatic.train(workload, watch, asked.folder)
        elif asked.kind == "graph":
            train_by_graph(workload, watch)
        else:
            train(workload, asked.kind, f"{asked.folder}/{name}", watch)
        measures |= {
            f"{name}/{measure}": value
            for measure, value in {"first_s": watch.first_s, **watch.measures}.items()
        }
    write_report(asked.report, measures)


if __name__ == "__main__":
    main()
