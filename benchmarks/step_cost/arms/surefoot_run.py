"""surefoot with all that is on by default; the batch is gathered from memory.

On are order, guard, norm, clipping, meter, events and console.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.step_cost.models import LEARNING_RATE, SEED, WORKLOADS, Batch, Workload
from benchmarks.step_cost.watch import Watch, main
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.train.run import Run


class Costed:
    """One of the workloads as a task.

    All parameters decay, as in `AdamW(model.parameters())`, so that weights can be compared.
    """

    def __init__(self, workload: str, batches: int) -> None:
        self.workload = replace(WORKLOADS[workload], num_batches=batches)

    def model(self) -> nn.Module:
        return self.workload.model()

    def data(self, split: str) -> Arrays:
        return Arrays(*self.workload.samples())

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        targets = batch[1]
        return Loss.sum(
            F.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum"),
            targets.numel(),
        )

    def parameter_groups(self, model: nn.Module) -> Sequence[dict[str, Any]]:
        return [{"params": list(model.parameters())}]


def train(workload: Workload, watch: Watch, folder: str) -> None:
    spec = RunSpec(
        task={
            "use": "benchmarks.step_cost.arms.surefoot_run:Costed",
            "workload": workload.name,
            "batches": workload.num_batches,
        },
        # shuffled, as by default, but where batches must be those of the other arms
        data={"shuffle": not watch.compares},
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
    watch.read_loss = lambda report: report.loss
    with Run(spec, folder=folder) as run:
        for report in islice(run.steps(), watch.total):
            watch.tick(run.model, report)


if __name__ == "__main__":
    main(train)
