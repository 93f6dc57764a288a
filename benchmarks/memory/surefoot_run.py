"""The same model as a surefoot run with its defaults, including the commit of the final weights."""

from __future__ import annotations

import sys

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.models import BATCH, STEPS, draw_samples, make_model
from surefoot.components.data.sources.arrays import Arrays
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Loss
from surefoot.train.run import Run
from surefoot.trial import peak_bytes, resident_bytes, write_report


class Wide:
    def model(self) -> nn.Module:
        return make_model()

    def data(self, split: str) -> Arrays:
        return Arrays(*draw_samples())

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        output: Tensor = model(batch[0])
        return output

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss.sum(F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1]))


def main() -> None:
    report, work = sys.argv[1:]
    imported_bytes = resident_bytes()
    spec = RunSpec(
        task={"use": "benchmarks.memory.surefoot_run:Wide"},
        train={"length": f"{STEPS} steps", "batch": BATCH, "threads": 1},
        observe={"tensorboard": False},
    )
    with Run(spec, folder=f"{work}/run") as run:
        for _ in run.steps():
            steps_bytes = peak_bytes() - imported_bytes
    measures = {
        "steps_bytes": steps_bytes,
        "whole_bytes": peak_bytes() - imported_bytes,
        "imported_bytes": imported_bytes,
    }
    write_report(report, measures)


if __name__ == "__main__":
    main()
